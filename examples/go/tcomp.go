// libtcomp for Go: models and sessions.
package main

/*
#cgo CFLAGS: -O2 -I${SRCDIR}/../../tcomp/runtime/include
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "libtcomp.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// Model is immutable: any number of goroutines may use it, each with a session of its own.
type Model struct{ handle *C.tcomp_model }

// Load loads a model to run on so many threads; 0: as it was compiled. A model is native code: load only what you trust.
func Load(path string, threads int) (*Model, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [C.TCOMP_MESSAGE]C.char
	model := &Model{}
	if code := C.tcomp_model_load(name, C.int(threads), 0, &model.handle, &why[0], C.TCOMP_MESSAGE); code != 0 {
		return nil, fmt.Errorf("%s (code %d)", C.GoString(&why[0]), int(code))
	}
	runtime.SetFinalizer(model, func(m *Model) { C.tcomp_model_free(m.handle) })
	return model, nil
}

// InputShape tells the extents of an input; -1 where they are free.
func (m *Model) InputShape(number int) []int64 {
	shape := make([]int64, 0)
	for axis := 0; axis < int(C.tcomp_model_rank(m.handle, C.TCOMP_INPUT, C.int(number))); axis++ {
		shape = append(shape, int64(C.tcomp_model_extent(m.handle, C.TCOMP_INPUT, C.int(number), C.int(axis))))
	}
	return shape
}

// Run runs a model whose inputs and outputs are of float32, in a session of its own, and returns the first output. Memory of Go must not be
// kept by C, so the values are copied.
func (m *Model) Run(inputs [][]float32, shapes [][]int64) ([]float32, error) {
	var why [C.TCOMP_MESSAGE]C.char
	var session *C.tcomp_session
	if C.tcomp_session_new(m.handle, &session, &why[0], C.TCOMP_MESSAGE) != 0 {
		return nil, errors.New(C.GoString(&why[0]))
	}
	defer C.tcomp_session_free(session)
	for n, values := range inputs {
		count := int64(1)
		for _, extent := range shapes[n] {
			count *= extent
		}
		if count != int64(len(values)) || C.GoString(C.tcomp_model_type(m.handle, C.TCOMP_INPUT, C.int(n))) != "float32" {
			return nil, fmt.Errorf("input %d is not of so many values of float32", n)
		}
		data := C.malloc(C.size_t(len(values)*4 + 4))
		defer C.free(data)
		copy(unsafe.Slice((*float32)(data), len(values)), values)
		shape := append(shapes[n], 0) // so that it has a first element
		if C.tcomp_session_set_input(session, C.int(n), data, (*C.int64_t)(&shape[0]), C.int(len(shapes[n]))) != 0 {
			return nil, errors.New(C.GoString(C.tcomp_session_message(session)))
		}
	}
	if C.tcomp_session_run(session) != 0 {
		return nil, errors.New(C.GoString(C.tcomp_session_message(session)))
	}
	count := int(C.tcomp_session_output_bytes(session, 0)) / 4
	outputs := make([]float32, count)
	copy(outputs, unsafe.Slice((*float32)(C.tcomp_session_output(session, 0)), count))
	runtime.KeepAlive(m)
	return outputs, nil
}
