//! Filters the output of mpirun. Messages about ranks that exited are held back, because the launcher reports the
//! same failures.

use std::io::{self, BufRead, BufReader, Read};
use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

/// Messages of mpirun that are held back.
#[derive(Clone, Default)]
pub struct MpirunMessages(Arc<Mutex<String>>);

impl MpirunMessages {
    /// Prints mpirun's output line by line, and holds back its messages about ranks that exited.
    fn read(&self, from: impl Read) {
        let mut blocks = MessageBlocks::default();
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.take(blocks.line(text));
            line.clear();
        }
        self.take(blocks.rest());
    }

    /// Starts a thread that reads an output stream of mpirun.
    pub fn read_in_thread(
        &self,
        from: Option<impl Read + Send + 'static>,
    ) -> io::Result<Option<JoinHandle<()>>> {
        let Some(from) = from else {
            return Ok(None);
        };
        let messages = self.clone();
        let builder = thread::Builder::new().name("mpirun".into());
        builder.spawn(move || messages.read(from)).map(Some)
    }

    /// Prints the messages that were held back, if nothing else explains the failure.
    pub fn show(&self) {
        show(&mem::take(&mut *self.0.lock()));
    }

    fn take(&self, text: Option<String>) {
        match text {
            None => {}
            Some(text) if is_exit_notice(&text) => {
                self.0.lock().push_str(&text);
            }
            Some(text) => show(&text),
        }
    }
}

fn show(text: &str) {
    for line in text.lines() {
        eprintln!("[mpirun] {line}");
    }
}

fn is_exit_notice(text: &str) -> bool {
    [
        "Primary job  terminated normally, but",
        "mpirun noticed that process rank",
        "mpirun detected that one or more processes exited",
        "mpirun has exited due to process rank",
    ]
    .iter()
    .any(|start| text.starts_with(start))
}

/// Splits mpirun's output into messages: the text between two horizontal lines, or a single line.
#[derive(Default)]
struct MessageBlocks {
    open: Option<String>,
}

impl MessageBlocks {
    fn line(&mut self, line: String) -> Option<String> {
        let is_rule = line.len() > 60 && line.bytes().all(|byte| byte == b'-');
        match (&mut self.open, is_rule) {
            (None, true) => {
                self.open = Some(String::new());
                None
            }
            (None, false) => Some(line + "\n"),
            (Some(_), true) => self.open.take(),
            (Some(block), false) => {
                block.push_str(&line);
                block.push('\n');
                None
            }
        }
    }

    /// Returns a message whose closing line is missing.
    fn rest(&mut self) -> Option<String> {
        self.open.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_on_exited_ranks_are_held_back_and_others_are_printed() {
        let rule = "-".repeat(74);
        let text = format!(
            "{rule}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code.\n\
             {rule}\n{rule}\nmpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 \
             (Killed).\n{rule}\n"
        );
        let remarks = MpirunMessages::default();
        remarks.read(text.as_bytes());
        let kept = remarks.0.lock().clone();
        assert_eq!(kept.lines().count(), 3, "{kept}");
        assert!(!kept.contains("--"), "{kept}");

        let mut blocks = MessageBlocks::default();
        assert_eq!(blocks.line("alone".into()).unwrap(), "alone\n");
        assert_eq!(blocks.line(rule.clone()), None);
        assert_eq!(blocks.line("There are not enough slots".into()), None);
        let block = blocks.line(rule).unwrap();
        assert_eq!(block, "There are not enough slots\n");
        assert!(!is_exit_notice(&block));
    }
}
