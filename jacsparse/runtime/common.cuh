// Before every kernel file: memory that the threads of a block share, and what the compiler alone does not define.
//
// Tests run the same files on a CPU, where CUDA's own keyword cannot be; they define all macros themselves.
#ifndef SHARED
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(type, name)                             \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* name = reinterpret_cast<type*>(name##_bytes)
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
