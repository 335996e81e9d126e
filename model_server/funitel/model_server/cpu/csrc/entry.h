// Names of the C interface. One library holds the same source compiled for several instruction sets, so the name of each
// function ends in its own: funitel_run_avx2. The compiler is given INSTRUCTION_SET, and another name for the namespace
// `funitel`, without which the linker would merge inline functions of different instruction sets.
#pragma once

#define FUNITEL_JOIN(name, instruction_set) name##_##instruction_set
#define FUNITEL_NAME(name, instruction_set) FUNITEL_JOIN(name, instruction_set)
#define ENTRY(name) FUNITEL_NAME(name, INSTRUCTION_SET)
