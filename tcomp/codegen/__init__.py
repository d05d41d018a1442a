"""Machine code: loop programs to LLVM IR, LLVM IR to objects, objects to one shared library."""
