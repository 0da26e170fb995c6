//! Cuts a file into documents, none of which is ever read farther than it may be long.

use std::io::{self, BufRead, Read};

use super::input::Layout;

/// The next piece of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A document, without what ends it.
    Document(Vec<u8>),
    /// One that is too long; it has been passed over.
    TooLong,
    /// Nothing is left.
    End,
}

/// The documents of a file.
pub struct Documents<R> {
    from: R,
    /// What they end with; nothing where the file is one.
    end: Option<Vec<u8>>,
    /// Whether a carriage return before the end belongs to it.
    lines: bool,
    limit: usize,
    done: bool,
}

impl<R: BufRead> Documents<R> {
    /// Those of `from`, each of at most `limit` bytes.
    pub fn new(from: R, layout: &Layout, limit: usize) -> Self {
        let end = match layout {
            Layout::Whole => None,
            Layout::Separated(end) => Some(end.clone()),
            Layout::Lines | Layout::Json => Some(b"\n".to_vec()),
        };
        Self {
            from,
            end,
            lines: matches!(layout, Layout::Lines | Layout::Json),
            limit,
            done: false,
        }
    }

    /// The next one.
    ///
    /// # Errors
    /// Those of reading, as for a packed file that ends too early.
    pub fn next(&mut self) -> io::Result<Next> {
        if self.done {
            return Ok(Next::End);
        }
        let (mut document, mut ended) = (vec![], false);
        // One byte more shows that there is more.
        let most = self.limit + self.end.as_ref().map_or(1, |end| end.len().max(1));
        while !ended && document.len() < most {
            let left = (most - document.len()) as u64;
            let mut some = (&mut self.from).take(left);
            let read = match &self.end {
                Some(end) => some.read_until(end[end.len() - 1], &mut document)?,
                None => some.read_to_end(&mut document)?,
            };
            ended = self.end.as_ref().is_some_and(|end| document.ends_with(end));
            if read == 0 {
                self.done = true;
                break;
            }
        }
        if let Some(end) = self.end.as_ref().filter(|_| ended) {
            document.truncate(document.len() - end.len());
        }
        if document.len() > self.limit {
            self.pass_over(&document, ended)?;
            return Ok(Next::TooLong);
        }
        if self.lines && document.last() == Some(&b'\r') {
            document.pop();
        }
        // What follows the last separator is no document where it is nothing.
        match self.done && document.is_empty() && self.end.is_some() {
            true => Ok(Next::End),
            false => Ok(Next::Document(document)),
        }
    }

    /// Reads on to the end of a document that is too long, keeping nothing of it.
    fn pass_over(&mut self, start: &[u8], ended: bool) -> io::Result<()> {
        const PIECE: u64 = 1 << 16;
        if ended || self.done {
            return Ok(());
        }
        let Some(end) = &self.end else {
            io::copy(&mut self.from, &mut io::sink())?;
            self.done = true;
            return Ok(());
        };
        // A separator may have begun in what was read.
        let mut last = start[start.len() - (end.len() - 1).min(start.len())..].to_vec();
        loop {
            let mut some = (&mut self.from).take(PIECE);
            if some.read_until(end[end.len() - 1], &mut last)? == 0 {
                self.done = true;
                return Ok(());
            }
            if last.ends_with(end) {
                return Ok(());
            }
            last.drain(..last.len() - (end.len() - 1).min(last.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(text: &[u8], layout: &Layout, limit: usize) -> Vec<Next> {
        // The smallest buffer, so that everything is cut somewhere.
        let from = io::BufReader::with_capacity(1, text);
        let mut documents = Documents::new(from, layout, limit);
        let mut found = vec![];
        loop {
            match documents.next().unwrap() {
                Next::End => return found,
                next => found.push(next),
            }
        }
    }

    fn document(text: &str) -> Next {
        Next::Document(text.into())
    }

    #[test]
    fn lines_end_with_or_without_a_carriage_return() {
        let found = all(b"a\r\n\nbc\n", &Layout::Lines, 9);
        assert_eq!(found, ["a", "", "bc"].map(document));
        assert_eq!(all(b"a\nb", &Layout::Lines, 9), ["a", "b"].map(document));
        assert_eq!(all(b"", &Layout::Lines, 9), []);
    }

    #[test]
    fn a_file_is_one_document() {
        assert_eq!(all(b"a\nb\n", &Layout::Whole, 4), [document("a\nb\n")]);
        assert_eq!(all(b"", &Layout::Whole, 4), [document("")]);
        assert_eq!(all(b"a\nb\nc", &Layout::Whole, 4), [Next::TooLong]);
    }

    #[test]
    fn too_long_documents_are_passed_over() {
        let found = all(b"abc\nabcd\nabcde\nx\nabcdefgh", &Layout::Lines, 4);
        let [abc, abcd, x] = ["abc", "abcd", "x"].map(document);
        assert_eq!(found, [abc, abcd, Next::TooLong, x, Next::TooLong]);
        let end = Layout::Separated(b"<>".to_vec());
        let found = all(b"abc<>abcd<<>x<>abcdefghi<>y>z", &end, 4);
        let [abc, x, y] = ["abc", "x", "y>z"].map(document);
        assert_eq!(found, [abc, Next::TooLong, x, Next::TooLong, y]);
        let found = all(
            &[b"abcd<>".repeat(3), b"abcdefg<".to_vec()].concat(),
            &end,
            4,
        );
        assert_eq!(found.len(), 4);
        assert_eq!(found[3], Next::TooLong);
    }

    proptest! {
        #[test]
        fn separators_split_as_of_strings(text in "[ab<>]{0,40}", end in "[<>]{1,3}", limit in 1usize..8) {
            let mut expected: Vec<_> = text.split(&end).collect();
            if expected.last() == Some(&"") {
                expected.pop();
            }
            let found = all(text.as_bytes(), &Layout::Separated(end.into_bytes()), limit);
            let of = |text: &&str| match text.len() > limit {
                true => Next::TooLong,
                false => document(text),
            };
            prop_assert_eq!(found, expected.iter().map(of).collect::<Vec<_>>());
        }
    }
}
