//! Files that are read whole, up to a size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The content of a file of at most `most` bytes.
///
/// # Errors
/// What the operating system says, and [`io::ErrorKind::FileTooLarge`] for a longer file, of which no more
/// is read, however long it says that it is.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let what = format!("it has more than {most} bytes, which are the most that are read");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

/// The same as text.
///
/// # Errors
/// As [`read`], and [`io::ErrorKind::InvalidData`] for what is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let bytes = read(path, most)?;
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
        let text = "it has more than 4 bytes, which are the most that are read";
        assert_eq!(error.to_string(), text);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(
            read_text(&path, 5).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    /// It says that it has no bytes, and has no end.
    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_no_file_to_wait_for() {
        assert!(read(Path::new("/dev/zero"), 1 << 20).is_err());
    }
}
