//! Splits a file into documents. At most the maximum length of a document is held in memory.

use std::io::{self, BufRead, Read};

use super::format::DocumentFormat;

/// Next document of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum NextDocument<T = Vec<u8>> {
    /// A document without its separator.
    Document(T),
    /// A document that is too long. It was skipped.
    TooLong,
    /// There are no more documents.
    End,
}

/// Reader for the documents of a file.
pub struct DocumentReader<R> {
    from: R,
    /// The separator, or `None` if the file is one document.
    end: Option<Vec<u8>>,
    /// Whether a carriage return before the separator belongs to the separator.
    lines: bool,
    limit: usize,
    done: bool,
}

impl<R: BufRead> DocumentReader<R> {
    /// Creates a reader for the documents of `from`, each of at most `limit` bytes.
    pub fn new(from: R, format: &DocumentFormat, limit: usize) -> Self {
        let end = match format {
            DocumentFormat::Whole | DocumentFormat::Table(_) => None,
            DocumentFormat::Separated(end) => Some(end.clone()),
            DocumentFormat::Lines | DocumentFormat::Json => Some(b"\n".to_vec()),
        };
        Self {
            from,
            end,
            lines: matches!(format, DocumentFormat::Lines | DocumentFormat::Json),
            limit,
            done: false,
        }
    }

    /// Returns the next document.
    ///
    /// # Errors
    /// Returns an error if reading fails, for example because a compressed file is truncated.
    pub fn next(&mut self) -> io::Result<NextDocument> {
        if self.done {
            return Ok(NextDocument::End);
        }
        let (mut document, mut ended) = (vec![], false);
        // One additional byte shows that the document is longer.
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
            self.skip_rest(&document, ended)?;
            return Ok(NextDocument::TooLong);
        }
        if self.lines && document.last() == Some(&b'\r') {
            document.pop();
        }
        // An empty rest after the last separator is not a document.
        if self.done && document.is_empty() && self.end.is_some() {
            Ok(NextDocument::End)
        } else {
            Ok(NextDocument::Document(document))
        }
    }

    /// Reads to the end of a document that is too long, and discards it.
    fn skip_rest(&mut self, start: &[u8], ended: bool) -> io::Result<()> {
        const PIECE: u64 = 1 << 16;
        if ended || self.done {
            return Ok(());
        }
        let Some(end) = &self.end else {
            io::copy(&mut self.from, &mut io::sink())?;
            self.done = true;
            return Ok(());
        };
        // A separator may begin within the bytes that were already read.
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

    fn all(text: &[u8], format: &DocumentFormat, limit: usize) -> Vec<NextDocument> {
        // The smallest buffer, so that every boundary is tested.
        let from = io::BufReader::with_capacity(1, text);
        let mut documents = DocumentReader::new(from, format, limit);
        let mut found = vec![];
        loop {
            match documents.next().unwrap() {
                NextDocument::End => return found,
                next => found.push(next),
            }
        }
    }

    fn document(text: &str) -> NextDocument {
        NextDocument::Document(text.into())
    }

    #[test]
    fn lines_end_with_or_without_a_carriage_return() {
        let found = all(b"a\r\n\nbc\n", &DocumentFormat::Lines, 9);
        assert_eq!(found, ["a", "", "bc"].map(document));
        assert_eq!(
            all(b"a\nb", &DocumentFormat::Lines, 9),
            ["a", "b"].map(document)
        );
        assert_eq!(all(b"", &DocumentFormat::Lines, 9), []);
    }

    #[test]
    fn a_file_is_one_document() {
        assert_eq!(
            all(b"a\nb\n", &DocumentFormat::Whole, 4),
            [document("a\nb\n")]
        );
        assert_eq!(all(b"", &DocumentFormat::Whole, 4), [document("")]);
        assert_eq!(
            all(b"a\nb\nc", &DocumentFormat::Whole, 4),
            [NextDocument::TooLong]
        );
    }

    #[test]
    fn too_long_documents_are_skipped() {
        let found = all(b"abc\nabcd\nabcde\nx\nabcdefgh", &DocumentFormat::Lines, 4);
        let [abc, abcd, x] = ["abc", "abcd", "x"].map(document);
        assert_eq!(
            found,
            [abc, abcd, NextDocument::TooLong, x, NextDocument::TooLong]
        );
        let end = DocumentFormat::Separated(b"<>".to_vec());
        let found = all(b"abc<>abcd<<>x<>abcdefghi<>y>z", &end, 4);
        let [abc, x, y] = ["abc", "x", "y>z"].map(document);
        assert_eq!(
            found,
            [abc, NextDocument::TooLong, x, NextDocument::TooLong, y]
        );
        let found = all(
            &[b"abcd<>".repeat(3), b"abcdefg<".to_vec()].concat(),
            &end,
            4,
        );
        assert_eq!(found.len(), 4);
        assert_eq!(found[3], NextDocument::TooLong);
    }

    proptest! {
        #[test]
        fn separators_split_as_of_strings(text in "[ab<>]{0,40}", end in "[<>]{1,3}", limit in 1usize..8) {
            let mut expected: Vec<_> = text.split(&end).collect();
            if expected.last() == Some(&"") {
                expected.pop();
            }
            let found = all(text.as_bytes(), &DocumentFormat::Separated(end.into_bytes()), limit);
            let of = |text: &&str| if text.len() > limit { NextDocument::TooLong } else { document(text) };
            prop_assert_eq!(found, expected.iter().map(of).collect::<Vec<_>>());
        }
    }
}
