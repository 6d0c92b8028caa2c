# SPDX-License-Identifier: Apache-2.0
# List comprehensions that run out of memory; for every module to cimport, for the C that comes with it.
#
# What Cython 3.3.0 and 3.3.1 make of a comprehension lets go of an item twice where PyList_Append fails. Here the item
# gets a reference more for that, in the one function of theirs that does so; with other releases it stays in memory
# after such a failure, and that is all.
cdef extern from *:
    """
    #include <string.h>
    static inline int tio_append(PyObject *list, PyObject *item, const char *caller)
    {
        int rc = PyList_Append(list, item);
        if (rc < 0 && strcmp(caller, "__Pyx_ListComp_AppendAndDecref") == 0)
            Py_INCREF(item);
        return rc;
    }
    #define PyList_Append(list, item) tio_append(list, item, __func__)
    """
