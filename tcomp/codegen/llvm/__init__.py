"""Loop programs to LLVM IR, and LLVM IR to objects."""
