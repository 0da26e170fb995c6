//! The output of the ranks, as complete lines prefixed with the rank.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use burn_megatron::regular_file::open_output;
use parking_lot::Mutex;

use super::error::LaunchError;

/// Maximum length of a line in bytes. Longer lines are split.
const MAX_LINE: usize = 1 << 20;

/// Output stream of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutputStream {
    Stdout,
    Stderr,
}

/// Writer for the output of all ranks, to the terminal and to files.
pub struct JobOutput {
    width: usize,
    quiet: bool,
    folder: PathBuf,
    /// The files of each rank that has not started yet.
    files: Mutex<HashMap<usize, [File; 2]>>,
    /// Prints the first error of the terminal only.
    terminal_error: Once,
    file_error: Once,
}

impl JobOutput {
    /// Creates the output for `ranks` ranks. `quiet` drops the standard output of all ranks except rank 0. If
    /// `folder` is set, two files per rank are opened in it.
    pub fn new(ranks: usize, quiet: bool, folder: Option<&Path>) -> Result<Self, LaunchError> {
        let mut files = HashMap::new();
        if let Some(folder) = folder {
            fs::create_dir_all(folder).map_err(unusable(folder))?;
            for rank in 0..ranks {
                let open = |extension| {
                    let path = folder.join(format!("rank-{rank}.{extension}"));
                    // Append to files of an earlier run.
                    let opened = open_output(&path, File::options().append(true).create(true));
                    opened.map_err(unusable(&path))
                };
                files.insert(rank, [open("out")?, open("err")?]);
            }
        }
        Ok(Self {
            width: ranks.saturating_sub(1).to_string().len(),
            quiet,
            folder: folder.unwrap_or(Path::new("")).to_owned(),
            files: Mutex::new(files),
            terminal_error: Once::new(),
            file_error: Once::new(),
        })
    }

    /// Returns standard output and standard error of one rank. The first call for a rank takes the files of the rank.
    pub fn rank(output: &Arc<Self>, rank: usize) -> [StreamOutput; 2] {
        let mut files = output.files.lock();
        let (out, err) = files.remove(&rank).map(|[out, err]| (out, err)).unzip();
        let of = |stream, file| StreamOutput {
            stream,
            lines: PrefixedLines::new(format!("[rank {rank:>0$}] ", output.width)),
            shown: stream == OutputStream::Stderr || rank == 0 || !output.quiet,
            file,
            output: Arc::clone(output),
        };
        [of(OutputStream::Stdout, out), of(OutputStream::Stderr, err)]
    }

    /// Prints complete lines. The first failure is reported, and failures do not end the ranks.
    fn show(&self, stream: OutputStream, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let written = match stream {
            OutputStream::Stdout => write_flushed(&mut io::stdout().lock(), bytes),
            OutputStream::Stderr => write_flushed(&mut io::stderr().lock(), bytes),
        };
        // A closed pipe, as with `| head`, is not an error.
        let written = written.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        });
        if let Err(error) = written {
            self.terminal_error.call_once(|| {
                eprintln!("error: the output of the ranks cannot be printed: {error}");
            });
        }
    }
}

fn write_flushed(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

fn unusable(path: &Path) -> impl FnOnce(io::Error) -> LaunchError {
    let path = path.to_owned();
    move |source| LaunchError::OutputFolder { path, source }
}

/// Output stream of one rank.
pub struct StreamOutput {
    stream: OutputStream,
    lines: PrefixedLines,
    shown: bool,
    file: Option<File>,
    output: Arc<JobOutput>,
}

/// Writing never fails. The first error of the terminal and the first error of a file are printed.
impl Write for StreamOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(file) = &mut self.file
            && let Err(error) = file.write_all(bytes)
        {
            self.file = None;
            self.output.file_error.call_once(|| {
                let folder = self.output.folder.display();
                eprintln!("error: the output of a rank can no longer be written to {folder}: {error}; the run continues");
            });
        }
        if self.shown {
            self.output.show(self.stream, &self.lines.take(bytes));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl StreamOutput {
    /// Prints the last line if it has no line end.
    pub fn finish(&mut self) {
        self.output.show(self.stream, &self.lines.rest());
    }
}

/// Splits a stream into lines, and prefixes each line.
///
/// A carriage return ends a line too, unless a newline follows it. Each state of a progress bar therefore becomes a
/// line. Lines may contain any bytes.
pub struct PrefixedLines {
    prefix: String,
    /// The bytes of the incomplete line.
    open: Vec<u8>,
}

impl PrefixedLines {
    /// Creates a splitter that adds `prefix` to each line.
    pub fn new(prefix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            open: Vec::new(),
        }
    }

    /// Returns the lines that `bytes` complete.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut whole = Vec::with_capacity(bytes.len() + self.prefix.len());
        for &byte in bytes {
            match (byte, self.open.last()) {
                (b'\n', _) => {
                    self.open.push(b'\n');
                    self.close(&mut whole);
                }
                (_, Some(b'\r')) => {
                    self.end_overwritten(&mut whole);
                    self.open.push(byte);
                }
                _ => self.open.push(byte),
            }
            if self.open.len() >= MAX_LINE {
                self.open.push(b'\n');
                self.close(&mut whole);
            }
        }
        whole
    }

    /// Returns the last line if it has no line end.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut whole = Vec::new();
        match self.open.last() {
            None => {}
            Some(b'\r') => self.end_overwritten(&mut whole),
            Some(_) => {
                self.open.push(b'\n');
                self.close(&mut whole);
            }
        }
        whole
    }

    /// Ends the line at its final carriage return.
    fn end_overwritten(&mut self, whole: &mut Vec<u8>) {
        self.open.pop();
        if !self.open.is_empty() {
            self.open.push(b'\n');
            self.close(whole);
        }
    }

    fn close(&mut self, whole: &mut Vec<u8>) {
        whole.extend_from_slice(self.prefix.as_bytes());
        whole.append(&mut self.open);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of `text`. Checks that pieces of every size give the same lines.
    fn lines(text: &[u8]) -> Vec<u8> {
        let cut = |size: usize| {
            let mut lines = PrefixedLines::new("> ");
            let pieces = text.chunks(size).map(|piece| lines.take(piece));
            let mut all = pieces.collect::<Vec<_>>().concat();
            all.extend(lines.rest());
            assert!(lines.rest().is_empty());
            all
        };
        let whole = cut(text.len());
        for size in 1..text.len() {
            assert_eq!(cut(size), whole, "pieces of {size}");
        }
        whole
    }

    #[test]
    fn each_line_gets_the_prefix() {
        assert_eq!(lines(b"a\n\nbc\n"), b"> a\n> \n> bc\n");
        assert_eq!(lines(b"no end"), b"> no end\n");
        assert_eq!(lines(b"\xff\x00\xfe\n"), b"> \xff\x00\xfe\n");
    }

    #[test]
    fn a_progress_bar_comes_line_by_line() {
        assert_eq!(lines(b"\r1 %\r2 %\rdone\n"), b"> 1 %\n> 2 %\n> done\n");
        assert_eq!(lines(b"1 %\r"), b"> 1 %\n");
        assert_eq!(lines(b"a\r\nb\r\n"), b"> a\r\n> b\r\n");
        assert_eq!(lines(b"a\r\r\nb"), b"> a\n> \r\n> b\n");
    }

    #[test]
    fn an_endless_line_comes_in_pieces() {
        let mut lines = PrefixedLines::new("> ");
        let shown = lines.take(&vec![b'x'; MAX_LINE + 1]);
        assert_eq!(shown.len(), 2 + MAX_LINE + 1);
        assert_eq!(lines.rest(), b"> x\n");
    }

    #[test]
    fn files_get_the_bytes_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let output = Arc::new(JobOutput::new(11, true, Some(folder)).unwrap());
        let [mut out, mut err] = JobOutput::rank(&output, 3);
        assert_eq!(out.lines.prefix, "[rank  3] ");
        out.write_all(b"a\rb").unwrap();
        out.write_all(b"c\xff").unwrap();
        out.finish();
        err.finish();
        assert_eq!(fs::read(folder.join("rank-3.out")).unwrap(), b"a\rbc\xff");
        assert_eq!(fs::read(folder.join("rank-3.err")).unwrap(), b"");
        // Output of the next run is appended.
        let output = Arc::new(JobOutput::new(11, true, Some(folder)).unwrap());
        let [mut out, _] = JobOutput::rank(&output, 3);
        out.write_all(b"d").unwrap();
        assert_eq!(fs::read(folder.join("rank-3.out")).unwrap(), b"a\rbc\xffd");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_ends_the_file_only() {
        let output = Arc::new(JobOutput::new(1, true, None).unwrap());
        let [_, mut err] = JobOutput::rank(&output, 0);
        err.file = Some(File::options().write(true).open("/dev/full").unwrap());
        err.write_all(b"a line that goes to the screen\n").unwrap();
        assert!(err.file.is_none());
        assert!(output.file_error.is_completed());
    }
}
