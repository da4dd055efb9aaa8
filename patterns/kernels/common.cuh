// Before every kernel file: memory that the threads of a block share.
//
// Tests run the same files on a CPU, where CUDA's own keyword cannot be; they define both macros themselves.
#ifndef SHARED
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_SHARED(type, name)                             \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* name = reinterpret_cast<type*>(name##_bytes)
#endif
