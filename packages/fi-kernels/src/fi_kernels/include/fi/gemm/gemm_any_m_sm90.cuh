// The kernels of GEMM on Hopper among which the launcher chooses for any number of tokens.
#pragma once
#include "fi/gemm/gemm_sm90.cuh"
#include "fi/gemm/gemm_small_m_sm90.cuh"
