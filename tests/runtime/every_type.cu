// A parameter of each type that a launch may have.
template <typename T>
__global__ void every_type(int whole, long long far, float single, double precise, bool answer, long long count,
                           const T *values, const int *places) {}
