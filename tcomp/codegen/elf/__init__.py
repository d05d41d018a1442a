"""A linker for ELF: objects of LLVM to one shared object, and back to an object that can be linked anew."""
