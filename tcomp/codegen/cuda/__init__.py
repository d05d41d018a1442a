"""Loop programs to CUDA C++, and CUDA C++ to machine code."""
