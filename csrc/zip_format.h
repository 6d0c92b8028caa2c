/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of the zip format, under the names of PKWARE's APPNOTE 6.3.10, whose
 * section stands behind each group. Nothing but numbers: what they mean for
 * this project stands in zip_read.c and zip_write.c.
 *
 * ZIP_x_SIZE is the length in bytes of the fixed part of a structure;
 * ZIP_x_FIELD is the offset of a field from the structure's first byte. All
 * integers are little-endian and unaligned; the comment gives their bytes.
 */
#ifndef TENSORIO_ZIP_FORMAT_H
#define TENSORIO_ZIP_FORMAT_H

/* Local file header, 4.3.7 */
#define ZIP_LOCAL_SIGNATURE 0x04034b50u /* "PK" 03 04 */
enum {
    ZIP_LOCAL_VERSION_NEEDED = 4,     /* 2 */
    ZIP_LOCAL_FLAGS = 6,              /* 2 */
    ZIP_LOCAL_METHOD = 8,             /* 2 */
    ZIP_LOCAL_TIME = 10,              /* 2 */
    ZIP_LOCAL_DATE = 12,              /* 2 */
    ZIP_LOCAL_CRC32 = 14,             /* 4 */
    ZIP_LOCAL_COMPRESSED_SIZE = 18,   /* 4 */
    ZIP_LOCAL_UNCOMPRESSED_SIZE = 22, /* 4 */
    ZIP_LOCAL_NAME_LENGTH = 26,       /* 2 */
    ZIP_LOCAL_EXTRA_LENGTH = 28,      /* 2 */
    ZIP_LOCAL_SIZE = 30               /* then the name, then the extra field */
};

/* Data descriptor, 4.3.9; the sizes take 8 bytes each in its zip64 form */
#define ZIP_DESCRIPTOR_SIGNATURE 0x08074b50u /* "PK" 07 08 */
enum {
    ZIP_DESCRIPTOR_CRC32 = 4,                /* 4 */
    ZIP_DESCRIPTOR_COMPRESSED_SIZE = 8,      /* 4 or 8 */
    ZIP_DESCRIPTOR_UNCOMPRESSED_SIZE = 12,   /* 4 */
    ZIP_DESCRIPTOR_UNCOMPRESSED_SIZE64 = 16, /* 8 */
    ZIP_DESCRIPTOR_SIZE = 16,
    ZIP_DESCRIPTOR_SIZE64 = 24
};

/* Central directory header, 4.3.12 */
#define ZIP_CENTRAL_SIGNATURE 0x02014b50u /* "PK" 01 02 */
enum {
    ZIP_CENTRAL_VERSION_MADE_BY = 4,      /* 2 */
    ZIP_CENTRAL_VERSION_NEEDED = 6,       /* 2 */
    ZIP_CENTRAL_FLAGS = 8,                /* 2 */
    ZIP_CENTRAL_METHOD = 10,              /* 2 */
    ZIP_CENTRAL_TIME = 12,                /* 2 */
    ZIP_CENTRAL_DATE = 14,                /* 2 */
    ZIP_CENTRAL_CRC32 = 16,               /* 4 */
    ZIP_CENTRAL_COMPRESSED_SIZE = 20,     /* 4 */
    ZIP_CENTRAL_UNCOMPRESSED_SIZE = 24,   /* 4 */
    ZIP_CENTRAL_NAME_LENGTH = 28,         /* 2 */
    ZIP_CENTRAL_EXTRA_LENGTH = 30,        /* 2 */
    ZIP_CENTRAL_COMMENT_LENGTH = 32,      /* 2 */
    ZIP_CENTRAL_DISK_START = 34,          /* 2 */
    ZIP_CENTRAL_INTERNAL_ATTRIBUTES = 36, /* 2 */
    ZIP_CENTRAL_EXTERNAL_ATTRIBUTES = 38, /* 4 */
    ZIP_CENTRAL_LOCAL_OFFSET = 42,        /* 4 */
    ZIP_CENTRAL_SIZE = 46                 /* then name, extra field, comment */
};

/* Zip64 end of central directory record, 4.3.14 */
#define ZIP_END64_SIGNATURE 0x06064b50u /* "PK" 06 06 */
enum {
    ZIP_END64_RECORD_SIZE = 4,       /* 8; does not count itself and the signature */
    ZIP_END64_VERSION_MADE_BY = 12,  /* 2 */
    ZIP_END64_VERSION_NEEDED = 14,   /* 2 */
    ZIP_END64_DISK = 16,             /* 4 */
    ZIP_END64_DIRECTORY_DISK = 20,   /* 4 */
    ZIP_END64_ENTRIES_ON_DISK = 24,  /* 8 */
    ZIP_END64_ENTRIES = 32,          /* 8 */
    ZIP_END64_DIRECTORY_SIZE = 40,   /* 8 */
    ZIP_END64_DIRECTORY_OFFSET = 48, /* 8 */
    ZIP_END64_SIZE = 56,             /* then the extensible data sector */
    ZIP_END64_SIZE_LEAD = 12         /* the bytes that the record size leaves out */
};

/* Zip64 end of central directory locator, 4.3.15 */
#define ZIP_LOCATOR_SIGNATURE 0x07064b50u /* "PK" 06 07 */
enum {
    ZIP_LOCATOR_END64_DISK = 4,   /* 4 */
    ZIP_LOCATOR_END64_OFFSET = 8, /* 8 */
    ZIP_LOCATOR_DISKS = 16,       /* 4 */
    ZIP_LOCATOR_SIZE = 20
};

/* End of central directory record, 4.3.16 */
#define ZIP_END_SIGNATURE 0x06054b50u /* "PK" 05 06 */
enum {
    ZIP_END_DISK = 4,              /* 2 */
    ZIP_END_DIRECTORY_DISK = 6,    /* 2 */
    ZIP_END_ENTRIES_ON_DISK = 8,   /* 2 */
    ZIP_END_ENTRIES = 10,          /* 2 */
    ZIP_END_DIRECTORY_SIZE = 12,   /* 4 */
    ZIP_END_DIRECTORY_OFFSET = 16, /* 4 */
    ZIP_END_COMMENT_LENGTH = 20,   /* 2 */
    ZIP_END_SIZE = 22              /* then the comment */
};

/* A field too small for its value holds all ones and the value stands in the
 * zip64 structure, 4.4.1.4. */
#define ZIP_MASKED16 0xFFFFu
#define ZIP_MASKED32 0xFFFFFFFFu

#define ZIP_SIGNATURE_SIZE 4u
#define ZIP_COMMENT_MAX    65535u /* the comment length has 16 bits */

/* General purpose bit flag, 4.4.4. Bits 1 and 2 tell how hard the deflater tried. */
#define ZIP_FLAG_DEFLATE_OPTIONS 0x0006u
#define ZIP_FLAG_DESCRIPTOR      0x0008u /* bit 3: sizes and CRC follow the payload */
#define ZIP_FLAG_UTF8            0x0800u /* bit 11: name and comment are UTF-8 */

/* Compression method, 4.4.5 */
#define ZIP_METHOD_STORED   0u
#define ZIP_METHOD_DEFLATED 8u

/* External file attributes, 4.4.15: MS-DOS attributes in the low byte, and by
 * custom a POSIX st_mode in the upper 16 bits. */
#define ZIP_DOS_DIRECTORY   0x10u
#define ZIP_UNIX_MODE_SHIFT 16
#define ZIP_UNIX_S_IFMT     0170000u
#define ZIP_UNIX_S_IFLNK    0120000u

/* Extra field, 4.5.1: header id, data size, data; zip64 extended information, 4.5.3 */
enum {
    ZIP_EXTRA_DATA_SIZE = 2, /* 2 */
    ZIP_EXTRA_SIZE = 4       /* then the data */
};
#define ZIP_EXTRA_ZIP64      0x0001u
#define ZIP_ZIP64_VALUE_SIZE 8u /* bytes of each value in it */

#endif
