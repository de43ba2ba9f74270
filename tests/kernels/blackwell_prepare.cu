// Blackwell's prepare kernel alone: it uses nothing that Hopper lacks, so Hopper can check it.
#include "sm_100a/prepare.cuh"
