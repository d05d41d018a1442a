module tcomp.example/classify

go 1.19
