//! Virtual slots: a stable place for any key among 1,024, so that a job's data can be cut without knowing its keys.
//!
//! The slot of a key is `CRC32(key) % 1024`, with the CRC-32 of IEEE 802.3 (that of zlib, gzip and PNG) over the key's bytes; a
//! number stands for its decimal text. It can be computed wherever the data is: `CRC32(key) % 1024` in MySQL and MariaDB,
//! `zlib.crc32(key.encode()) % 1024` in Python, [`slot_of`] in Rust. SQLite has no such function: there the slot is a column that
//! whoever writes the data fills in. It never changes: a key's slot is part of what people have stored.

/// How many slots there are. Enough for 64 shards whose slots differ by a sixteenth; few enough to be named one by one.
pub const SLOTS: u32 = 1_024;

/// The slot of a key, from 0 to 1,023.
#[must_use]
pub fn slot_of(key: &[u8]) -> u32 {
    crc32fast::hash(key) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slots_are_those_of_other_languages() {
        // SELECT CRC32('123456789') is 3421780262 in MySQL; so is zlib.crc32(b"123456789") in Python.
        assert_eq!(slot_of(b"123456789"), (3_421_780_262_u32) % SLOTS);
        assert_eq!(slot_of(b""), 0);
        // SELECT CRC32('N14228'): is 2231757166.
        assert_eq!(slot_of(b"N14228"), 0x8505_e96e_u32 % SLOTS);
    }

    #[test]
    fn keys_spread_over_all_slots() {
        let mut of = vec![0_u32; SLOTS as usize];
        for key in 0..102_400 {
            of[slot_of(key.to_string().as_bytes()) as usize] += 1;
        }
        assert!(of.iter().all(|n| (40..=180).contains(n)), "{:?}", (of.iter().min(), of.iter().max()));
    }
}
