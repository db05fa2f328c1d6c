//! Where records of a text file end, and where a file may be cut: a machine over bytes that needs no more memory than its state.

use serde::{Deserialize, Serialize};

/// What a record of a file is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// A line.
    #[default]
    Lines,
    /// A row of comma-separated values; a quoted field may hold line ends.
    Csv,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Where a quote opens a quoted field.
    FieldStart,
    /// In a field without quotes.
    Field,
    /// In a quoted field; a line end is data.
    Quoted,
    /// Behind a quote in a quoted field: it ended the field, unless another quote follows.
    Quote,
}

/// Finds the ends of records in the bytes of one file, fed in order and in pieces of any size.
#[derive(Clone, Debug)]
pub struct RecordEnds {
    format: FileFormat,
    delimiter: u8,
    at: At,
    offset: u64,
}

/// What stands between fields where nothing else is said, and what else is usual.
pub const COMMA: u8 = b',';
const OTHER_DELIMITERS: [u8; 3] = [b';', b'\t', b'|'];

/// The delimiter that a first record has in place of a comma, where it has no comma at all.
#[must_use]
pub fn not_a_comma(first_record: &[u8]) -> Option<char> {
    let other = OTHER_DELIMITERS.into_iter().find(|other| first_record.contains(other));
    other.filter(|_| !first_record.contains(&COMMA)).map(char::from)
}

impl RecordEnds {
    /// At the beginning of a file, or of a record at `offset`.
    #[must_use]
    pub fn new(format: FileFormat, offset: u64) -> Self {
        RecordEnds { format, delimiter: COMMA, at: At::FieldStart, offset }
    }

    /// With another character than a comma between fields.
    #[must_use]
    pub fn delimited_by(self, delimiter: u8) -> Self {
        RecordEnds { delimiter, ..self }
    }

    /// Takes the next bytes and calls `end` with the offset behind each record that ends in them, line end included.
    pub fn feed(&mut self, bytes: &[u8], mut end: impl FnMut(u64)) {
        for byte in bytes {
            self.offset += 1;
            if self.format == FileFormat::Lines {
                if *byte == b'\n' {
                    end(self.offset);
                }
                continue;
            }
            self.at = match (self.at, byte) {
                (At::FieldStart, b'"') | (At::Quote, b'"') => At::Quoted,
                (At::Quoted, b'"') => At::Quote,
                (At::Quoted, _) => At::Quoted,
                (_, b'\n') => {
                    end(self.offset);
                    At::FieldStart
                }
                (_, b'\r') => At::FieldStart,
                (_, other) if *other == self.delimiter => At::FieldStart,
                _ => At::Field,
            };
        }
    }

    /// Whether the bytes ended inside a quoted field: the file is cut off or is not what its job says.
    #[must_use]
    pub fn open_quote(&self) -> bool {
        self.format == FileFormat::Csv && self.at == At::Quoted
    }
}

/// Chooses the cuts of one file while its records' ends come by: as near behind equal parts as records allow.
#[derive(Clone, Debug)]
pub struct Cutter {
    from: u64,
    to: u64,
    parts: u64,
    /// The next of the equal parts' ends, counted from 1.
    next: u64,
    cuts: Vec<u64>,
}

impl Cutter {
    /// To cut the bytes `from..to` into at most `parts`.
    #[must_use]
    pub fn new(from: u64, to: u64, parts: u32) -> Self {
        Cutter { from, to, parts: u64::from(parts.max(1)), next: 1, cuts: Vec::new() }
    }

    /// Where the next cut should be; `None`: there is none to come.
    #[must_use]
    pub fn target(&self) -> Option<u64> {
        let length = u128::from(self.to.saturating_sub(self.from));
        let at = length * u128::from(self.next) / u128::from(self.parts);
        (self.next < self.parts).then(|| self.from.saturating_add(u64::try_from(at).unwrap_or(u64::MAX)))
    }

    /// A record ends before this offset.
    pub fn end(&mut self, offset: u64) {
        if self.target().is_none_or(|target| offset < target) || offset <= self.from || offset >= self.to {
            return;
        }
        self.cuts.push(offset);
        while self.target().is_some_and(|target| target <= offset) {
            self.next += 1;
        }
    }

    /// The parts, in order, none of them empty unless the whole is.
    #[must_use]
    pub fn parts(&self) -> Vec<(u64, u64)> {
        let starts = std::iter::once(self.from).chain(self.cuts.iter().copied());
        let ends = self.cuts.iter().copied().chain([self.to]);
        starts.zip(ends).collect()
    }
}

/// How many parts each file gets of `count`, by its bytes: at least one for each that has any, and none for an empty one.
#[must_use]
pub fn share_parts(sizes: &[u64], count: u32) -> Vec<u32> {
    let total: u128 = sizes.iter().map(|s| u128::from(*s)).sum();
    let of = |size: &u64| {
        if *size == 0 {
            return 0;
        }
        let share = (u128::from(*size) * u128::from(count) + total / 2) / total;
        u32::try_from(share).unwrap_or(u32::MAX).max(1)
    };
    sizes.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends(format: FileFormat, bytes: &[u8], piece: usize) -> Vec<u64> {
        let mut machine = RecordEnds::new(format, 0);
        let mut found = Vec::new();
        for piece in bytes.chunks(piece.max(1)) {
            machine.feed(piece, |end| found.push(end));
        }
        found
    }

    #[test]
    fn a_line_end_in_quotes_ends_no_record() {
        let text = b"id,text\r\n1,\"two\nlines, \"\"quoted\"\"\"\n2,a\"b\n3,\"\"\n";
        assert_eq!(ends(FileFormat::Csv, text, 7), vec![9, 35, 41, 46]);
        assert_eq!(ends(FileFormat::Lines, text, 5), vec![9, 16, 35, 41, 46]);
        let mut german = Vec::new();
        RecordEnds::new(FileFormat::Csv, 0).delimited_by(b';').feed(b"1;\"a\nb\";2,\"c\n", |end| german.push(end));
        assert_eq!(german, vec![13]);
        let mut open = RecordEnds::new(FileFormat::Csv, 0);
        open.feed(b"1,\"never closed\n", |_| panic!("no record ends here"));
        assert!(open.open_quote());
    }

    #[test]
    fn another_delimiter_shows_in_the_first_record() {
        assert_eq!(not_a_comma(b"id;name\n"), Some(';'));
        assert_eq!(not_a_comma(b"id\tname; the first\n"), Some(';'));
        assert_eq!((not_a_comma(b"id,a;b\n"), not_a_comma(b"id\n")), (None, None));
    }

    #[test]
    fn files_share_the_parts_by_their_bytes() {
        assert_eq!(share_parts(&[100, 0, 300], 8), vec![2, 0, 6]);
        assert_eq!(share_parts(&[1, 1_000_000], 4), vec![1, 4]);
        assert_eq!(share_parts(&[0, 0], 4), vec![0, 0]);
    }

    fn field() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a-z0-9]{0,6}",
            "[a-z,\n\r]{0,8}".prop_map(|text| format!("\"{text}\"")),
            Just("\"a \"\"quote\"\"\n\"".to_owned()),
        ]
    }

    proptest! {
        #[test]
        fn s5_a_file_is_covered_exactly_and_cut_at_record_ends_only(
            rows in prop::collection::vec(prop::collection::vec(field(), 1..4), 0..60),
            (parts, piece, last_ends) in (1u32..12, 1usize..40, any::<bool>()),
        ) {
            let mut text: String = rows.iter().map(|row| row.join(",") + "\n").collect();
            // What the rows' own lengths say is the second witness of the machine.
            let mut expected = Vec::new();
            let mut at = 0;
            for row in &rows {
                at += row.join(",").len() as u64 + 1;
                expected.push(at);
            }
            if !last_ends {
                text.pop();
                expected.pop();
            }
            prop_assert_eq!(&ends(FileFormat::Csv, text.as_bytes(), piece), &expected);
            let mut cutter = Cutter::new(0, text.len() as u64, parts);
            expected.iter().for_each(|end| cutter.end(*end));
            let cut = cutter.parts();
            prop_assert!(cut.len() <= parts as usize);
            let mut next = 0;
            for (from, to) in &cut {
                prop_assert_eq!(*from, next, "gap or overlap");
                prop_assert!(to > from || text.is_empty());
                prop_assert!(expected.contains(to) || *to == text.len() as u64, "a cut inside a record");
                next = *to;
            }
            prop_assert_eq!(next, text.len() as u64);
        }
    }
}
