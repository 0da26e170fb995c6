//! Reads whole files up to a maximum size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::regular_file;

/// Reads a regular file of at most `max_bytes` bytes.
///
/// # Errors
/// The errors of [`regular_file::open`], and [`io::ErrorKind::FileTooLarge`] for a longer file.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_open(regular_file::open(path)?, max_bytes)
}

/// Reads a regular file as [`read`] does, as text.
///
/// # Errors
/// The errors of [`read`], and [`io::ErrorKind::InvalidData`] for content that is not UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read(path, max_bytes)?)
}

/// Reads text from a regular file or a stream, such as `/dev/stdin`.
///
/// # Errors
/// The errors of [`regular_file::open_stream`] and [`read_text`].
pub fn read_text_stream(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read_open(regular_file::open_stream(path)?, max_bytes)?)
}

/// Reads an open file to its end. A file of more than `max_bytes` bytes is an error, whatever size the file reports.
fn read_open(file: File, max_bytes: u64) -> io::Result<Vec<u8>> {
    let too_large = || {
        let what = format!("it has more than {max_bytes} bytes, the maximum");
        io::Error::new(io::ErrorKind::FileTooLarge, what)
    };
    if file.metadata()?.len() > max_bytes {
        return Err(too_large());
    }
    let mut bytes = vec![];
    file.take(max_bytes.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(too_large());
    }
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
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

    /// The device reports no size, and does not end.
    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_not_read_forever() {
        let zero = Path::new("/dev/zero");
        let error = read(zero, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error = read_text_stream(zero, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
