//! Reads files up to a maximum size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The content of a file of at most `max_bytes` bytes.
///
/// # Errors
/// Errors of the operating system, and [`io::ErrorKind::FileTooLarge`] for a longer file, of which no more
/// is read, whatever its reported size is.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    File::open(path)?
        .take(max_bytes + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let what = format!("it has more than {max_bytes} bytes, the maximum");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

/// As [`read`], as text.
///
/// # Errors
/// As [`read`], and [`io::ErrorKind::InvalidData`] for content that is not UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let bytes = read(path, max_bytes)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let text = "it has more than 4 bytes, the maximum";
        assert_eq!(error.to_string(), text);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(
            read_text(&path, 5).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    /// It reports no size, and does not end.
    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_no_file_to_wait_for() {
        assert!(read(Path::new("/dev/zero"), 1 << 20).is_err());
    }
}
