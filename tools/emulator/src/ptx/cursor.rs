//! A position among the words of a text.

use std::collections::HashMap;

use super::lex::{Token, Word};
use super::scope::Scopes;
use super::{Malformed, Operand};

/// The maximum nesting depth of braces and signs in an operand, so that a text cannot exhaust the stack.
const DEPTH: usize = 8;

pub(super) struct Parser<'a> {
    pub tokens: &'a [Token<'a>],
    pub at: usize,
    pub scopes: Scopes,
    /// The labels of each `.branchtargets`, by name.
    pub tables: HashMap<String, Vec<Operand>>,
    depth: usize,
}

impl<'a> Parser<'a> {
    pub fn new(tokens: &'a [Token<'a>]) -> Self {
        Self {
            tokens,
            at: 0,
            scopes: Scopes::default(),
            tables: HashMap::new(),
            depth: 0,
        }
    }

    pub fn peek(&self) -> Option<Word<'a>> {
        self.tokens.get(self.at).map(|token| token.word)
    }

    pub fn follows(&self, word: Word<'_>) -> bool {
        self.tokens.get(self.at + 1).map(|token| token.word) == Some(word)
    }

    pub fn next(&mut self) -> Result<Word<'a>, Malformed> {
        let word = self.peek();
        let word = word.ok_or_else(|| self.wrong("the text ends here"))?;
        self.at += 1;
        Ok(word)
    }

    /// Returns the line of the next word.
    pub fn line(&self) -> usize {
        let token = self.tokens.get(self.at).or(self.tokens.last());
        token.map_or(1, |token| token.line)
    }

    /// Returns an error at the next word.
    pub fn wrong(&self, what: impl Into<String>) -> Malformed {
        Malformed {
            line: self.line(),
            what: what.into(),
        }
    }

    /// Returns an error at the word that was just read.
    pub fn wrong_here(&mut self, what: impl Into<String>) -> Malformed {
        self.at = self.at.saturating_sub(1);
        self.wrong(what)
    }

    pub fn is(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(Word::Mark(mark));
        self.at += usize::from(found);
        found
    }

    pub fn expect(&mut self, mark: char) -> Result<(), Malformed> {
        if self.is(mark) {
            Ok(())
        } else {
            Err(self.wrong(format!("{mark:?} is missing before {:?}", self.peek())))
        }
    }

    pub fn name(&mut self) -> Result<&'a str, Malformed> {
        match self.next()? {
            Word::Name(name) => Ok(name),
            other => Err(self.wrong_here(format!("a name is missing: {other:?}"))),
        }
    }

    /// Skips the rest of a line.
    pub fn skip_line(&mut self, line: usize) {
        while self.at < self.tokens.len() && self.line() == line {
            self.at += 1;
        }
    }

    /// Skips all words up to and including the mark.
    pub fn skip_past(&mut self, mark: char) -> Result<(), Malformed> {
        while self.next()? != Word::Mark(mark) {}
        Ok(())
    }

    /// Parses `inner` one nesting level deeper.
    pub fn nested<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, Malformed>,
    ) -> Result<T, Malformed> {
        if self.depth == DEPTH {
            return Err(self.wrong("an operand nests too deep"));
        }
        self.depth += 1;
        let parsed = inner(self);
        self.depth -= 1;
        parsed
    }
}
