// classify MODEL.tcomp INPUT.bin: runs a model on the values in a file, and prints where its first output is largest.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "tcomp.hpp"

int main(int argc, char **argv) {
  if (argc != 3) return std::cerr << "usage: classify MODEL.tcomp INPUT.bin\n", 2;
  try {
    tcomp::model model(argv[1]);
    tcomp::session session(model);
    std::ifstream file(argv[2], std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    auto shape = model.inputs().at(0).shape;
    std::replace(shape.begin(), shape.end(), std::int64_t{-1}, std::int64_t{1});
    session.set_input(0, values, shape);
    session.run();
    auto scores = session.output<float>(0);
    std::cout << "class " << std::max_element(scores.begin(), scores.end()) - scores.begin() << "\n";
  } catch (const std::exception &problem) {
    std::cerr << "error: " << problem.what() << "\n";
    return 2;
  }
}
