// classify MODEL.tcomp INPUT.bin: runs a model on the values in a file, and prints where its first output is largest.
package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
)

func classify(path, input string) (int, error) {
	model, err := Load(path, 0)
	if err != nil {
		return 0, err
	}
	bytes, err := os.ReadFile(input)
	if err != nil {
		return 0, err
	}
	values := make([]float32, len(bytes)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
	}
	shape := model.InputShape(0)
	for axis, extent := range shape {
		if extent < 0 {
			shape[axis] = 1
		}
	}
	scores, err := model.Run([][]float32{values}, [][]int64{shape})
	best := 0
	for i := range scores {
		if scores[i] > scores[best] {
			best = i
		}
	}
	return best, err
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: classify MODEL.tcomp INPUT.bin")
		os.Exit(2)
	}
	class, err := classify(os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	fmt.Println("class", class)
}
