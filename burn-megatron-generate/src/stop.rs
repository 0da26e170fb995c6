//! The detection of stop strings in a text.

/// A filter that passes text on until it finds a stop string. Text that may be the beginning of a stop string is held
/// back.
#[derive(Debug)]
pub(super) struct StopStringFilter<'a> {
    stops: &'a [String],
    buffered: String,
    stopped: bool,
}

impl<'a> StopStringFilter<'a> {
    /// Creates a filter. None of the strings may be empty.
    pub fn new(stops: &'a [String]) -> Self {
        Self {
            stops,
            buffered: String::new(),
            stopped: false,
        }
    }

    /// Returns whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Adds text, and returns the text that can be passed on.
    pub fn push(&mut self, text: &str) -> String {
        self.buffered.push_str(text);
        if let Some(begin) = self.first_stop() {
            self.stopped = true;
            let mut text = std::mem::take(&mut self.buffered);
            text.truncate(begin);
            return text;
        }
        let waiting = self.buffered.split_off(self.certain());
        std::mem::replace(&mut self.buffered, waiting)
    }

    /// Returns the text that was held back and that is not part of a stop string.
    pub fn finish(self) -> String {
        self.buffered
    }

    /// Returns the start of the stop string that would be found first if the text were added character by character.
    fn first_stop(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let begin = self.buffered.find(stop.as_str())?;
            Some((begin + stop.len(), begin))
        });
        found.min().map(|(_, begin)| begin)
    }

    /// Returns the length of the leading text that cannot be the beginning of a stop string.
    fn certain(&self) -> usize {
        let ends = self.buffered.char_indices().map(|(at, _)| at);
        let mut begins = ends.filter(|at| {
            let rest = &self.buffered[*at..];
            self.stops.iter().any(|stop| stop.starts_with(rest))
        });
        begins.next().unwrap_or(self.buffered.len())
    }
}
