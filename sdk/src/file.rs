//! Reading a shard's part of a file.
//!
//! ```no_run
//! use shardcron_sdk::{FilePart, ShardContext, ShardError};
//! use std::io::{BufRead, BufReader};
//!
//! fn lines(context: &ShardContext) -> Result<u64, ShardError> {
//!     let mut rows = 0;
//!     for line in BufReader::new(FilePart::open(&context.slice)?).lines() {
//!         let _line = line.map_err(|e| ShardError::transient(e.to_string()))?;
//!         rows += 1;
//!     }
//!     Ok(rows)
//! }
//! ```

use crate::handler::ShardError;
use shardcron_domain::plan::{PlannedFile, ShardSlice};
use std::fs::{File, Metadata};
use std::io::{Read, Seek, SeekFrom, Take};
use std::time::UNIX_EPOCH;

/// The bytes of a shard's part of a file: whole records, without the file's header. Reads block.
#[derive(Debug)]
pub struct FilePart {
    part: Take<File>,
    file: PlannedFile,
}

fn now(metadata: &Metadata) -> (u64, i64) {
    let since = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    (metadata.len(), i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// Whether the file of a slice is what it was when the job fired. Any other slice is fine.
///
/// # Errors
/// Permanent: it has changed, and cuts that were made in it mean nothing any more. Transient: it can't be looked at here.
pub fn check(slice: &ShardSlice) -> Result<(), ShardError> {
    let ShardSlice::File { file, .. } = slice else { return Ok(()) };
    let metadata = std::fs::metadata(&file.path).map_err(|e| unreadable(file, &e))?;
    let (size, modified_ms) = now(&metadata);
    file.check(size, modified_ms).map_err(ShardError::permanent)
}

fn unreadable(file: &PlannedFile, e: &std::io::Error) -> ShardError {
    ShardError::transient(format!("{} can't be read where this worker runs: {e}", file.path))
}

impl FilePart {
    /// Opens the part that a slice names.
    ///
    /// # Errors
    /// The slice is no part of a file, the file has changed since the job fired, or it can't be read.
    pub fn open(slice: &ShardSlice) -> Result<Self, ShardError> {
        let ShardSlice::File { file, from, to, .. } = slice else {
            return Err(ShardError::permanent(
                "the shard has no part of a file; give the job shards = { file = { path } }",
            ));
        };
        let mut opened = File::open(&file.path).map_err(|e| unreadable(file, &e))?;
        let (size, modified_ms) = now(&opened.metadata().map_err(|e| unreadable(file, &e))?);
        file.check(size, modified_ms).map_err(ShardError::permanent)?;
        opened.seek(SeekFrom::Start(*from)).map_err(|e| unreadable(file, &e))?;
        Ok(FilePart { part: opened.take(to.saturating_sub(*from)), file: file.clone() })
    }

    /// The header of the file, as it stands there; empty without one.
    ///
    /// # Errors
    /// It can't be read.
    pub fn header(&self) -> Result<Vec<u8>, ShardError> {
        let mut header = Vec::new();
        File::open(&self.file.path)
            .and_then(|file| file.take(self.file.header).read_to_end(&mut header))
            .map_err(|e| unreadable(&self.file, &e))?;
        Ok(header)
    }

    /// Whether the file is still what was planned: for the end of the work, as it may have changed while it was read.
    ///
    /// # Errors
    /// It has changed.
    pub fn check(&self) -> Result<(), ShardError> {
        let (size, modified_ms) = now(&std::fs::metadata(&self.file.path).map_err(|e| unreadable(&self.file, &e))?);
        self.file.check(size, modified_ms).map_err(ShardError::permanent)
    }
}

impl Read for FilePart {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.part.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_domain::record_ends::FileFormat;

    #[test]
    fn a_part_is_read_and_a_changed_file_is_refused() {
        let path = std::env::temp_dir().join(format!("shardcron-part-{}", std::process::id()));
        std::fs::write(&path, "id\n1\n2\n3\n").unwrap();
        let (size, modified_ms) = now(&std::fs::metadata(&path).unwrap());
        let file = PlannedFile { path: path.display().to_string(), size, modified_ms, header: 3 };
        let slice = ShardSlice::File { file, format: FileFormat::Csv, from: 5, to: 9 };
        let mut part = FilePart::open(&slice).unwrap();
        let mut text = String::new();
        part.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), part.header().unwrap()), ("2\n3\n", b"id\n".to_vec()));
        assert!(check(&slice).is_ok() && part.check().is_ok());
        std::fs::write(&path, "id\n1\n2\n3\n4\n").unwrap();
        let refused = FilePart::open(&slice).unwrap_err();
        assert!(refused.message.contains("has changed since the job fired"), "{refused}");
        assert!(check(&slice).is_err() && part.check().is_err());
        std::fs::remove_file(&path).unwrap();
        assert!(check(&slice).unwrap_err().message.contains("can't be read"));
    }
}
