# Horovod 0.28.1 asks CMake for C++14; the headers of torch 2.1 and later need C++17, those of 2.13 C++20.
# Loaded through CMAKE_PROJECT_INCLUDE, so that the sdist from PyPI is built unpatched.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
# Without debug symbols, which make its library 64 MB and a third of the build.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG" CACHE STRING "" FORCE)
