//! What the ranks write, as whole lines with the rank in front.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::error::LaunchError;
use super::frame::Stream;
use super::say;

/// A line that is longer than this is shown in pieces.
const MAX_LINE: usize = 1 << 20;

/// Where the output of all ranks goes.
pub struct Output {
    width: usize,
    quiet: bool,
    folder: PathBuf,
    /// The files of each rank that has not come yet.
    files: Mutex<HashMap<usize, [File; 2]>>,
    screen: Reports,
    disk: Reports,
}

/// A complaint that is made once.
#[derive(Default)]
struct Reports(AtomicBool);

impl Reports {
    fn once(&self, text: impl FnOnce() -> String) {
        if !self.0.swap(true, Ordering::Relaxed) {
            say(&text());
        }
    }
}

impl Output {
    /// The output of `ranks` out of a world; `quiet` leaves out the standard output of all but rank 0.
    /// With a folder, each rank has two files there.
    pub fn new(
        world: usize,
        ranks: Range<usize>,
        quiet: bool,
        folder: Option<&Path>,
    ) -> Result<Self, LaunchError> {
        let mut files = HashMap::new();
        if let Some(folder) = folder {
            fs::create_dir_all(folder).map_err(unusable(folder))?;
            for rank in ranks {
                let open = |extension| {
                    let path = folder.join(format!("rank-{rank}.{extension}"));
                    // What an earlier run has written there stays.
                    let opened = File::options().append(true).create(true).open(&path);
                    opened.map_err(unusable(&path))
                };
                files.insert(rank, [open("out")?, open("err")?]);
            }
        }
        Ok(Self {
            width: world.saturating_sub(1).to_string().len(),
            quiet,
            folder: folder.unwrap_or(Path::new("")).to_owned(),
            files: Mutex::new(files),
            screen: Reports::default(),
            disk: Reports::default(),
        })
    }

    /// The two streams of one rank, with its files, which go to the first who asks.
    pub fn rank(&self, rank: usize) -> RankOutput<'_> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let (out, err) = match files.remove(&rank) {
            Some([out, err]) => (Some(out), Some(err)),
            None => (None, None),
        };
        let sink = |stream, file| Sink {
            stream,
            lines: Lines::new(format!("[rank {rank:>0$}] ", self.width)),
            shown: stream == Stream::Err || rank == 0 || !self.quiet,
            file,
            output: self,
        };
        RankOutput {
            out: sink(Stream::Out, out),
            err: sink(Stream::Err, err),
        }
    }

    /// Shows whole lines. A screen that is gone is no reason to end the ranks.
    fn show(&self, stream: Stream, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let written = match stream {
            Stream::Out => write_flushed(&mut io::stdout().lock(), bytes),
            Stream::Err => write_flushed(&mut io::stderr().lock(), bytes),
        };
        // Who reads no more, as in `| head`, is not to be told.
        let written = written.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        });
        if let Err(error) = written {
            self.screen
                .once(|| format!("error: the output of the ranks cannot be shown: {error}"));
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

/// The two streams of one rank.
pub struct RankOutput<'a> {
    out: Sink<'a>,
    err: Sink<'a>,
}

impl RankOutput<'_> {
    /// Takes bytes that the rank wrote.
    pub fn write(&mut self, stream: Stream, bytes: &[u8]) {
        match stream {
            Stream::Out => self.out.write(bytes),
            Stream::Err => self.err.write(bytes),
        }
    }

    /// Shows what is left without the end of a line.
    pub fn finish(&mut self) {
        self.out.finish();
        self.err.finish();
    }
}

struct Sink<'a> {
    stream: Stream,
    lines: Lines,
    shown: bool,
    file: Option<File>,
    output: &'a Output,
}

impl Sink<'_> {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.file
            && let Err(error) = file.write_all(bytes)
        {
            self.file = None;
            self.output.disk.once(|| {
                let folder = self.output.folder.display();
                format!("error: {folder} takes no more output of a rank: {error}; the run goes on")
            });
        }
        if self.shown {
            self.output.show(self.stream, &self.lines.take(bytes));
        }
    }

    fn finish(&mut self) {
        self.output.show(self.stream, &self.lines.rest());
    }
}

/// Cuts a stream into lines and puts a prefix in front of each.
///
/// A carriage return ends a line too, unless a newline follows: what a progress bar draws over each
/// other comes one below the other. Lines may hold any bytes.
pub struct Lines {
    prefix: String,
    /// The line that has not ended yet.
    open: Vec<u8>,
}

impl Lines {
    /// Lines with `prefix` in front.
    pub fn new(prefix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            open: Vec::new(),
        }
    }

    /// The lines that `bytes` complete.
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

    /// The last line, if it never ended.
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

    /// Ends a line at the carriage return that it ends in.
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

    /// The lines of `text`, given in pieces of every size, which must not matter.
    fn lines(text: &[u8]) -> Vec<u8> {
        let cut = |size: usize| {
            let mut lines = Lines::new("> ");
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
        let mut lines = Lines::new("> ");
        let shown = lines.take(&vec![b'x'; MAX_LINE + 1]);
        assert_eq!(shown.len(), 2 + MAX_LINE + 1);
        assert_eq!(lines.rest(), b"> x\n");
    }

    #[test]
    fn files_get_the_bytes_as_they_are() {
        let folder =
            std::env::temp_dir().join(format!("burn-megatron-output-{}", std::process::id()));
        let output = Output::new(11, 3..4, true, Some(&folder)).unwrap();
        let mut rank = output.rank(3);
        assert_eq!(rank.out.lines.prefix, "[rank  3] ");
        rank.write(Stream::Out, b"a\rb");
        rank.write(Stream::Out, b"c\xff");
        rank.finish();
        assert_eq!(fs::read(folder.join("rank-3.out")).unwrap(), b"a\rbc\xff");
        assert_eq!(fs::read(folder.join("rank-3.err")).unwrap(), b"");
        // Those of the next run follow.
        let output = Output::new(11, 3..4, true, Some(&folder)).unwrap();
        output.rank(3).write(Stream::Out, b"d");
        assert_eq!(fs::read(folder.join("rank-3.out")).unwrap(), b"a\rbc\xffd");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_ends_the_file_only() {
        let output = Output::new(1, 0..1, true, None).unwrap();
        let mut rank = output.rank(0);
        rank.err.file = Some(File::options().write(true).open("/dev/full").unwrap());
        rank.write(Stream::Err, b"a line that goes to the screen\n");
        assert!(rank.err.file.is_none());
        assert!(output.disk.0.load(Ordering::Relaxed));
    }
}
