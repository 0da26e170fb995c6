//! The header of a run: a short summary, and details for `--verbose` and the run folder.

use std::io;

use burn_megatron::atomic_file::replace_file;
use burn_megatron_train::run_folder::RunFolder;

use crate::terminal::{labelled, wrapped};

/// Header of a run, which is printed and stored as text.
pub struct Header {
    verbose: bool,
    text: String,
}

impl Header {
    /// Creates a header. It prints its details if `verbose` is true.
    pub fn new(verbose: bool) -> Self {
        Self {
            verbose,
            text: String::new(),
        }
    }

    /// Adds a line to the summary, and prints it. An empty label continues the previous line.
    pub fn line(&mut self, label: &str, text: impl AsRef<str>) {
        self.add(labelled(label, text.as_ref()), true);
    }

    /// Adds a line to the details.
    pub fn detail(&mut self, label: &str, text: impl AsRef<str>) {
        self.add(labelled(label, text.as_ref()), self.verbose);
    }

    /// Adds a table to the details.
    pub fn table(&mut self, table: &str) {
        self.add(format!("\n{}\n", wrapped(table.trim())), self.verbose);
    }

    fn add(&mut self, text: String, print: bool) {
        if print {
            println!("{text}");
        }
        self.text += &text;
        self.text.push('\n');
    }

    /// Writes the summary and the details to `header.txt` in the run folder. Prints the path of the file unless the
    /// header is verbose.
    pub fn write(&mut self, folder: &RunFolder) -> io::Result<()> {
        let file = folder.path().join("header.txt");
        replace_file(&file, self.text.as_bytes())?;
        if !self.verbose {
            println!("{}", labelled("details", &file.display().to_string()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_details_that_the_summary_leaves_out() {
        let runs = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(runs.path(), Some("run")).unwrap();
        let mut header = Header::new(false);
        header.line("engine", "threads");
        header.table("rank  tensor\n0     0");
        header.detail("buckets", "2 of 128 elements");
        header.write(&folder).unwrap();
        let text = std::fs::read_to_string(folder.path().join("header.txt")).unwrap();
        insta::assert_snapshot!(text, @"
        engine   threads

        rank  tensor
        0     0

        buckets  2 of 128 elements
        ");
    }
}
