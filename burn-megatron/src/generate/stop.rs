//! Text that ends before some strings.

/// Passes text on until one of several strings has come. What may be the beginning of one waits.
#[derive(Debug)]
pub(super) struct UntilStop<'a> {
    stops: &'a [String],
    held: String,
    stopped: bool,
}

impl<'a> UntilStop<'a> {
    /// None of the strings is empty.
    pub fn new(stops: &'a [String]) -> Self {
        Self {
            stops,
            held: String::new(),
            stopped: false,
        }
    }

    /// Whether one of the strings has come.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Takes more text and gives what can be passed on.
    pub fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        if let Some(begin) = self.first_stop() {
            self.stopped = true;
            let mut held = std::mem::take(&mut self.held);
            held.truncate(begin);
            return held;
        }
        let waiting = self.held.split_off(self.certain());
        std::mem::replace(&mut self.held, waiting)
    }

    /// What waited for a string that did not come.
    pub fn finish(self) -> String {
        self.held
    }

    /// Where the string begins that ends first, as if the text had come one character at a time.
    fn first_stop(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let begin = self.held.find(stop.as_str())?;
            Some((begin + stop.len(), begin))
        });
        found.min().map(|(_, begin)| begin)
    }

    /// How much of what is held cannot be the beginning of a string.
    fn certain(&self) -> usize {
        let ends = self.held.char_indices().map(|(at, _)| at);
        let mut begins = ends.filter(|at| {
            let rest = &self.held[*at..];
            self.stops.iter().any(|stop| stop.starts_with(rest))
        });
        begins.next().unwrap_or(self.held.len())
    }
}
