//! What a file is, by its first bytes: text that can be read from its middle, or something that can't.

/// Bytes of a beginning that tell everything here apart.
pub const BEGINNING_BYTES: u64 = 10;

/// What some programs write before UTF-8. It belongs to no field.
const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];
/// What a block of bzip2 begins with, behind `BZh` and a digit. Text may well begin with those three letters.
const BZIP2_BLOCK: &[u8] = &[0x31, 0x41, 0x59, 0x26, 0x53, 0x59];
/// How files begin whose middle says nothing without their beginning, and what they are. From the formats' own descriptions.
const NO_TEXT: [(&[u8], &str); 7] = [
    (&[0x1f, 0x8b], "compressed with gzip"),
    (b"PK\x03\x04", "a zip archive"),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "compressed with xz"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "compressed with zstd"),
    (&[0x04, 0x22, 0x4d, 0x18], "compressed with lz4"),
    (&[0xff, 0xfe], "UTF-16"),
    (&[0xfe, 0xff], "UTF-16"),
];

/// How a file begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// Like text, whose first record begins at this byte.
    Text {
        /// 0, or behind a byte order mark.
        from: u64,
    },
    /// Like something else: "compressed with gzip".
    NoText(&'static str),
}

impl Beginning {
    /// Of a file's first [`BEGINNING_BYTES`], or of all that it has.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        if bytes.starts_with(b"BZh") && bytes.get(4..).is_some_and(|rest| rest.starts_with(BZIP2_BLOCK)) {
            return Beginning::NoText("compressed with bzip2");
        }
        match NO_TEXT.iter().find(|(magic, _)| bytes.starts_with(magic)) {
            Some((_, what)) => Beginning::NoText(what),
            None if bytes.starts_with(BYTE_ORDER_MARK) => Beginning::Text { from: BYTE_ORDER_MARK.len() as u64 },
            None => Beginning::Text { from: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_middle_is_told_from_text() {
        for (bytes, what) in [
            (&[0x1f, 0x8b, 8, 0][..], "gzip"),
            (b"PK\x03\x04\x14", "zip"),
            (b"BZh91AY&SY", "bzip2"),
            (b"\xfd7zXZ\0\0", "xz"),
            (&[0x28, 0xb5, 0x2f, 0xfd, 1], "zstd"),
            (&[0x04, 0x22, 0x4d, 0x18, 0x64], "lz4"),
            (&[0xff, 0xfe, b'1', 0], "UTF-16"),
            (&[0xfe, 0xff, 0, b'1'], "UTF-16"),
        ] {
            assert!(matches!(Beginning::of(bytes), Beginning::NoText(found) if found.contains(what)), "{what}");
        }
        for text in [&b""[..], b"1,2\n", b"BZhou,1\n2,3", b"BZh9", b"PK,1\n", b"7zXZ"] {
            assert_eq!(Beginning::of(text), Beginning::Text { from: 0 }, "{text:?}");
        }
        assert_eq!(Beginning::of(b"\xef\xbb\xbfid,a\n"), Beginning::Text { from: 3 });
    }
}
