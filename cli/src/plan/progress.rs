//! Progress of a search on standard error.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn_megatron_plan::search::SearchProgress;
use indicatif::{ProgressBar, ProgressStyle};

use crate::numbers::grouped;

/// Time before the first line, and between two lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress of a search: a bar on a terminal, elsewhere a line every five seconds. A short search prints nothing.
pub struct PlanProgress {
    bar: Option<ProgressBar>,
    shown: Mutex<Instant>,
}

impl Default for PlanProgress {
    fn default() -> Self {
        Self {
            bar: io::stderr().is_terminal().then(bar),
            shown: Mutex::new(Instant::now()),
        }
    }
}

impl PlanProgress {
    /// Shows a state.
    pub fn show(&self, at: SearchProgress) {
        if let Some(bar) = &self.bar {
            bar.set_message(line(at));
            bar.set_length(at.all as u64);
            bar.set_position(at.compared as u64);
            return;
        }
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.elapsed() >= LINE_INTERVAL {
            eprintln!("{}", line(at));
            *shown = Instant::now();
        }
    }
}

impl Drop for PlanProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:10.cyan/blue}  {wide_msg}");
    let style = style.expect("the template is a constant");
    ProgressBar::new(0).with_style(style.progress_chars("━╸─"))
}

fn line(at: SearchProgress) -> String {
    format!(
        "planning: compared {} of {} layouts, computed the memory of {}",
        grouped(at.compared),
        grouped(at.all),
        grouped(at.confirmed),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_how_far_the_search_is() {
        let at = SearchProgress {
            compared: 1200,
            all: 3400,
            confirmed: 12,
        };
        assert_eq!(
            line(at),
            "planning: compared 1,200 of 3,400 layouts, computed the memory of 12"
        );
    }
}
