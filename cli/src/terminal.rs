//! The width of the terminal, text that fits it, and progress bars.

use std::env;
use std::io;

use indicatif::ProgressStyle;
use terminal_size::{Width, terminal_size_of};
use textwrap::{Options, WordSplitter};

/// The maximum line width, because wider lines are hard to read.
pub const MAX_COLUMNS: usize = 200;

/// The width of charts if the terminal width is unknown.
const DEFAULT_COLUMNS: usize = 120;

/// The minimum width to which text is wrapped.
const MIN_COLUMNS: usize = 40;

/// The variable with the line width for output that does not go to a terminal. clap uses it for the help too, and
/// `launch` sets it for its ranks.
pub const VARIABLE: &str = "COLUMNS";

/// The maximum length of the label of a line.
const MAX_LABEL: usize = 20;

/// The number of columns before the text of a labeled line.
pub const LABEL: usize = 9;

/// Returns the width of standard output in characters, from its terminal or from `COLUMNS`. Without either, returns
/// `None`, and lines may have any length.
pub fn width() -> Option<usize> {
    let terminal = terminal_size_of(io::stdout()).map(|(Width(columns), _)| columns.into());
    let variable = || env::var(VARIABLE).ok()?.parse().ok();
    let columns: usize = terminal.or_else(variable)?;
    Some(columns.clamp(MIN_COLUMNS, MAX_COLUMNS))
}

/// Returns the width of charts.
pub fn columns() -> usize {
    width().unwrap_or(DEFAULT_COLUMNS)
}

/// Returns the style of a progress bar with this indicatif template.
pub fn bar_style(template: &'static str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}

/// Returns a line of the header of a run: `label    text`. Long text is wrapped and continues below the start of the
/// text.
pub fn labelled(label: &str, text: &str) -> String {
    wrap_after(&padded(label), text, width())
}

/// Returns the label of a line with at least one space after it.
fn padded(label: &str) -> String {
    format!("{label:<0$} ", LABEL - 1)
}

/// Wraps long lines. Continuation lines start below the text of the line, which may follow a label and two spaces.
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

/// Returns the options for wrapping, which do not break paths and names with dashes.
fn options<'a>(width: usize) -> Options<'a> {
    let options = Options::new(width).break_words(false);
    options.word_splitter(WordSplitter::NoHyphenation)
}

/// Returns the column at which the text of a line begins, after its label if it has one.
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
