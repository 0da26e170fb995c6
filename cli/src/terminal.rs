//! The width of the terminal, text that fits it, and progress bars.

use std::env;
use std::io;

use indicatif::ProgressStyle;
use terminal_size::{Width, terminal_size_of};
use textwrap::{Options, WordSplitter};

/// Wider lines are hard to read.
pub const MAX_COLUMNS: usize = 200;

/// The columns of charts where the width is not known.
const DEFAULT_COLUMNS: usize = 120;

/// The fewest columns that text is wrapped to.
const MIN_COLUMNS: usize = 40;

/// The width of lines that do not go to a terminal, as for the help. `launch` sets it for its ranks.
pub const VARIABLE: &str = "COLUMNS";

/// The longest label of a line.
const MAX_LABEL: usize = 20;

/// The columns before the text of a labelled line.
pub const LABEL: usize = 9;

/// Returns the width of standard output in characters, from its terminal or from `COLUMNS`. `None` without both, where
/// lines may have any length.
pub fn width() -> Option<usize> {
    let terminal = terminal_size_of(io::stdout()).map(|(Width(columns), _)| columns.into());
    let variable = || env::var(VARIABLE).ok()?.parse().ok();
    let columns: usize = terminal.or_else(variable)?;
    Some(columns.clamp(MIN_COLUMNS, MAX_COLUMNS))
}

/// The width of charts.
pub fn columns() -> usize {
    width().unwrap_or(DEFAULT_COLUMNS)
}

/// Returns the style of a progress bar with this template of indicatif.
pub fn bar_style(template: &'static str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}

/// A line of the header of a run: `label    text`. Text that is too long goes on below its start.
pub fn labelled(label: &str, text: &str) -> String {
    wrap_after(&padded(label), text, width())
}

/// A label of a line with at least one space after it.
fn padded(label: &str) -> String {
    format!("{label:<0$} ", LABEL - 1)
}

/// Breaks the lines that are too long. They go on below their text, which may have a label and two spaces before it.
pub fn wrapped(text: &str) -> String {
    wrapped_to(text, width())
}

fn wrapped_to(text: &str, width: Option<usize>) -> String {
    let lines = text.lines().map(|line| match width {
        Some(width) if line.chars().count() > width => {
            let indent = " ".repeat(text_column(line));
            textwrap::fill(line, options(width).subsequent_indent(&indent))
        }
        _ => line.into(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Paths and names with dashes are not broken.
fn options<'a>(width: usize) -> Options<'a> {
    let options = Options::new(width).break_words(false);
    options.word_splitter(WordSplitter::NoHyphenation)
}

/// Where the text of a line begins, after its label if it has one.
fn text_column(line: &str) -> usize {
    let start = line.len() - line.trim_start().len();
    let rest = &line[start..];
    let Some((label, text)) = rest.split_once("  ") else {
        return start;
    };
    let column = line.len() - text.trim_start().len();
    if label.len() <= MAX_LABEL {
        column
    } else {
        start
    }
}

fn wrap_after(label: &str, text: &str, width: Option<usize>) -> String {
    let Some(width) = width else {
        return format!("{label}{text}");
    };
    let indent = " ".repeat(label.len());
    let options = options(width).initial_indent(label);
    textwrap::fill(text, options.subsequent_indent(&indent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_are_too_long_are_broken() {
        let text = "memory  parameters 12 MiB, gradients 6 MiB\nr0 F0 F1\n  1.0e-10 (sums in another order)";
        assert_eq!(wrapped_to(text, None), text);
        assert_eq!(
            wrapped_to(text, Some(28)),
            "memory  parameters 12 MiB,\n        gradients 6 MiB\nr0 F0 F1\n  1.0e-10 (sums in another\n  order)"
        );
    }

    #[test]
    fn a_long_line_goes_on_below_its_text() {
        let text = "8 samples of 128 tokens: 4 per rank in micro-batches of 1";
        assert_eq!(
            wrap_after("batch    ", text, None),
            format!("batch    {text}")
        );
        assert_eq!(
            wrap_after("batch    ", text, Some(40)),
            "batch    8 samples of 128 tokens: 4 per\n         rank in micro-batches of 1"
        );
        assert_eq!(padded("batch"), "batch    ");
        assert_eq!(padded("tokenizers"), "tokenizers ");
    }
}
