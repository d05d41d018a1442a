/* libtcomp, compiled by cgo. */
#include "../../tcomp/runtime/include/libtcomp.c"
