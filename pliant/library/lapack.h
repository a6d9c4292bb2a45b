/* LAPACK and BLAS by address: routines of a library that the package loads.
 *
 * Fortran's interface with 32-bit integers: all arguments are pointers, matrices are
 * column-major, and the length of each string comes last. runtime/lapack.py finds the
 * routines, in the order of this list, for f32 and then for f64. */
#ifndef PLT_LAPACK_H
#define PLT_LAPACK_H

#include "library.h"

#define PLT_LAPACK_ROUTINES(X)                                                       \
    X(potrf) X(getrf) X(trsm) X(gemm) X(gelqf) X(orglq) X(ormlq) X(gesdd) X(syevd)   \
    X(geev) X(sytrf) X(sytrs)

typedef void (*plt_routine)(void);

#define PLT_LAPACK_MEMBER(name) plt_routine name;
typedef struct plt_lapack {
    PLT_LAPACK_ROUTINES(PLT_LAPACK_MEMBER)
} plt_lapack;
#undef PLT_LAPACK_MEMBER

/* Makes the routines known, before the first call of any function that uses them:
 * tables[0] are those of f32, tables[1] of f64. They must not be freed. */
PLT_API void plt_use_lapack(const plt_lapack *tables);

#endif
