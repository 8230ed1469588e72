// What Hopper has for pages of any size: warps that take alternate keys, and clusters where there is little work.
#pragma once
#include "fi/attention/decode/batch_decode.cuh"
#include "fi/attention/decode/cluster_sm90.cuh"
