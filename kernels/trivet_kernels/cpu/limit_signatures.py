"""The C functions of native/limits_api.cpp, for `library`: name, result, arguments. The last argument takes the seconds of each round."""

import ctypes

LIMIT_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "trivet_time_reads": (ctypes.c_int32, (ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "trivet_time_products": (ctypes.c_double, (ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "trivet_time_meetings": (None, (ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "trivet_time_matmul": (
        ctypes.c_int64,
        (
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ),
    ),
}
