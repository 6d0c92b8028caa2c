/* SPDX-License-Identifier: Apache-2.0 */
#include "status.h"

int tio_fail(tio_error *err, int code, uint64_t offset, uint64_t want, uint64_t got,
             const char *what)
{
    err->code = code;
    err->offset = offset;
    err->want = want;
    err->got = got;
    err->what = what;
    return code;
}

const char *tio_code_name(int code)
{
    switch (code) {
    case TIO_OK: return "ok";
    case TIO_TRUNCATED: return "truncated";
    case TIO_MALFORMED: return "malformed";
    case TIO_UNSUPPORTED: return "unsupported";
    case TIO_LIMIT: return "limit";
    case TIO_MISMATCH: return "mismatch";
    case TIO_NOSPACE: return "no space";
    default: return "unknown";
    }
}
