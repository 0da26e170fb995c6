//! Opens and reads regular files up to a maximum size. If the path is a pipe, device, socket or folder, an error is
//! returned immediately.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, IsTerminal, Read, Seek};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The time within which another process must open a named pipe.
const PIPE_DEADLINE: Duration = Duration::from_secs(5);

/// The first bytes of a Git LFS pointer.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// The maximum size of a Git LFS pointer in bytes, according to its specification.
const MAX_LFS_POINTER: u64 = 1024;

/// Opens a regular file for reading. Links are followed.
///
/// # Errors
/// Errors of the operating system, and an error if the path is another kind of file, a link to a missing file, or a Git
/// LFS pointer. The error kind for a missing file is [`io::ErrorKind::NotFound`]. The error for a link to a missing
/// file has another kind.
pub fn open(path: &Path) -> io::Result<File> {
    let mut file = open_with(path, OpenOptions::new().read(true))?;
    check_not_lfs_pointer(&mut file)?;
    Ok(file)
}

/// Opens an existing regular file with the given options.
///
/// # Errors
/// The errors of [`open`], except that a Git LFS pointer is not an error.
pub fn open_with(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // The kind is checked before opening, because opening changes the state of some devices.
    check_kind(kind_of(path)?)?;
    let file = without_waiting(options).open(path)?;
    check_kind(file.metadata()?.file_type())?;
    Ok(file)
}

/// Opens a file for a single sequential read. The file may be a regular file, a pipe or a terminal, such as
/// `/dev/stdin`.
///
/// # Errors
/// The errors of [`open`], and [`io::ErrorKind::TimedOut`] for a named pipe to which no process writes.
pub fn open_stream(path: &Path) -> io::Result<File> {
    let kind = kind_of(path)?;
    if is_pipe(kind) {
        return open_pipe(path, OpenOptions::new().read(true), PIPE_DEADLINE);
    }
    if is_device(kind) {
        // Other devices, such as `/dev/zero`, may not end.
        let device = open_pipe(path, OpenOptions::new().read(true), PIPE_DEADLINE)?;
        if device.is_terminal() {
            return Ok(device);
        }
    }
    open(path)
}

/// Reads a regular file with at most `max_bytes` bytes.
///
/// # Errors
/// The errors of [`open`], and [`io::ErrorKind::FileTooLarge`] for a longer file.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_open(open(path)?, max_bytes)
}

/// Reads a regular file with at most `max_bytes` bytes as UTF-8 text.
///
/// # Errors
/// The errors of [`read`], and [`io::ErrorKind::InvalidData`] for content that is not UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read(path, max_bytes)?)
}

/// Reads UTF-8 text from a regular file or a stream, such as `/dev/stdin`.
///
/// # Errors
/// The errors of [`open_stream`] and [`read_text`].
pub fn read_text_stream(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read_open(open_stream(path)?, max_bytes)?)
}

/// Reads an open file to its end. A file of more than `max_bytes` bytes is an error, regardless of the size
/// that the file reports.
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

/// Opens a file for writing with the given options. The file may be a pipe or a device.
///
/// # Errors
/// Errors of the operating system, and [`io::ErrorKind::TimedOut`] for a named pipe from which no process reads.
pub fn open_output(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    match fs::metadata(path) {
        Ok(found) if is_pipe(found.file_type()) => open_pipe(path, options, PIPE_DEADLINE),
        _ => options.open(path),
    }
}

/// Whether a file, a folder or a link exists at a path. Unlike [`Path::exists`], it returns true for a link to a
/// missing file.
pub fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Returns the kind of the file at a path. Links are followed.
fn kind_of(path: &Path) -> io::Result<FileType> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.file_type()),
        Err(error) => match fs::read_link(path) {
            Ok(to) if error.kind() == io::ErrorKind::NotFound => {
                let to = to.display();
                let what = format!("it is a link to {to}, which does not exist");
                Err(io::Error::other(what))
            }
            _ => Err(error),
        },
    }
}

fn check_kind(kind: FileType) -> io::Result<()> {
    let what = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a folder"
    } else if is_pipe(kind) {
        "a pipe"
    } else if is_device(kind) {
        "a device"
    } else {
        "a socket"
    };
    let what = format!("it is {what}: expected a regular file");
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Opens a pipe or a device. Opening a named pipe blocks until another process opens its other end.
fn open_pipe(path: &Path, options: &OpenOptions, deadline: Duration) -> io::Result<File> {
    let (send, opened) = mpsc::channel();
    let (path, options) = (path.to_path_buf(), options.clone());
    thread::Builder::new()
        .name("open-pipe".into())
        .spawn(move || send.send(options.open(path)))?;
    opened.recv_timeout(deadline).unwrap_or_else(|_| {
        let what = format!(
            "no other process has opened this named pipe within {} s: start that process first",
            deadline.as_secs_f64()
        );
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    })
}

/// Returns an error for a Git LFS pointer, which a clone contains in place of a file if Git LFS is not
/// installed.
pub(crate) fn check_not_lfs_pointer(file: &mut File) -> io::Result<()> {
    if file.metadata()?.len() > MAX_LFS_POINTER {
        return Ok(());
    }
    let mut head = vec![];
    file.by_ref()
        .take(LFS_POINTER.len() as u64)
        .read_to_end(&mut head)?;
    file.rewind()?;
    if head != LFS_POINTER {
        return Ok(());
    }
    let what = "it is a Git LFS pointer, not the file itself: install Git LFS and run `git lfs pull` in the folder of \
                this file";
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

/// Makes `open` return immediately for a pipe that has replaced the file since the check.
fn without_waiting(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK);
    options
}

#[cfg(unix)]
fn is_pipe(kind: FileType) -> bool {
    std::os::unix::fs::FileTypeExt::is_fifo(&kind)
}

#[cfg(not(unix))]
fn is_pipe(_: FileType) -> bool {
    false
}

#[cfg(unix)]
fn is_device(kind: FileType) -> bool {
    use std::os::unix::fs::FileTypeExt;
    kind.is_char_device() || kind.is_block_device()
}

#[cfg(not(unix))]
fn is_device(_: FileType) -> bool {
    false
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    fn make_pipe(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }

    #[test]
    fn only_a_regular_file_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink("file", at("link")).unwrap();
        for name in ["file", "link"] {
            let mut text = String::new();
            open(&at(name)).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "text");
        }
        make_pipe(&at("pipe"));
        symlink("pipe", at("link to pipe")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        for (name, what) in [
            ("pipe", "it is a pipe: expected a regular file"),
            ("link to pipe", "it is a pipe"),
            ("", "it is a folder"),
            ("/dev/null", "it is a device"),
            ("socket", "it is a socket"),
            ("dangling", "it is a link to nowhere, which does not exist"),
        ] {
            for error in [
                open(&at(name)).unwrap_err(),
                open_with(&at(name), OpenOptions::new().append(true)).unwrap_err(),
            ] {
                assert!(error.to_string().starts_with(what), "{name}: {error}");
                // Callers treat a file that is not found as optional.
                assert_ne!(error.kind(), io::ErrorKind::NotFound, "{name}");
            }
        }
        let missing = open(&at("missing")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        assert!(is_there(&at("dangling")) && !is_there(&at("missing")));
    }

    #[test]
    fn a_git_lfs_pointer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        fs::write(&path, pointer).unwrap();
        let error = open(&path).unwrap_err().to_string();
        assert!(error.contains("git lfs pull"), "{error}");
        // A longer file is not a pointer, for example a page about Git LFS.
        fs::write(&path, pointer.repeat(20)).unwrap();
        open(&path).unwrap();
    }

    #[test]
    fn a_pipe_is_a_stream_once_it_has_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let [mut read, mut write] = [OpenOptions::new(), OpenOptions::new()];
        for (name, options) in [
            ("no writer", read.read(true)),
            ("no reader", write.write(true)),
        ] {
            let path = folder.path().join(name);
            make_pipe(&path);
            let error = open_pipe(&path, options, Duration::from_millis(20)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{name}");
        }
        let path = folder.path().join("written");
        make_pipe(&path);
        let to = path.clone();
        let writer = thread::spawn(move || fs::write(to, "text"));
        let mut text = String::new();
        open_stream(&path)
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        writer.join().unwrap().unwrap();
        assert_eq!(text, "text");
        open_stream(folder.path()).unwrap_err();
        open_stream(Path::new("/dev/zero")).unwrap_err();
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let text = "it has more than 4 bytes, the maximum";
        assert_eq!(error.to_string(), text);
        fs::write(&path, [0xff]).unwrap();
        assert_eq!(
            read_text(&path, 5).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    /// The device reports no size, and does not end.
    #[test]
    fn a_device_without_an_end_is_not_read_forever() {
        let zero = Path::new("/dev/zero");
        let error = read(zero, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error = read_text_stream(zero, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
