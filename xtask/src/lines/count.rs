//! The lines of a Rust file that have code.

use std::collections::BTreeSet;
use std::str::FromStr;

use proc_macro2::{Delimiter, Group, Span, TokenStream, TokenTree};

/// A file and its numbers of lines.
#[derive(Debug)]
pub struct CountedFile {
    /// The path, relative to the repository.
    pub path: String,
    /// Lines with code: all but comments, documentation, blanks and the items of tests.
    pub code: usize,
    /// Lines of items with `#[cfg(test)]`, without comments and blanks.
    pub tests: usize,
    /// All lines.
    pub all: usize,
    /// Names of the modules that are declared with `#[cfg(test)]` and have their own files.
    test_modules: Vec<String>,
}

impl CountedFile {
    /// Counts the lines of `text`.
    ///
    /// # Errors
    ///
    /// If `text` has no tokens of Rust.
    pub fn new(path: String, text: &str) -> Result<Self, String> {
        let stream = TokenStream::from_str(text)
            .map_err(|e| format!("{path}:{}: {e}", e.span().start().line))?;
        let mut counter = Counter::default();
        counter.walk(stream, false);
        Ok(Self {
            code: counter.code.len(),
            tests: counter.tests.difference(&counter.code).count(),
            all: text.lines().count(),
            test_modules: counter.test_modules,
            path,
        })
    }

    /// The paths of its test modules, without the ending `.rs`.
    pub fn test_modules(&self) -> impl Iterator<Item = String> {
        let stem = self.path.trim_end_matches(".rs");
        let (folder, name) = stem.rsplit_once('/').unwrap_or(("", stem));
        let base = match name {
            "mod" | "lib" | "main" => folder,
            _ => stem,
        };
        let modules = self.test_modules.iter();
        modules.map(move |module| format!("{base}/{module}"))
    }
}

/// The numbers of lines with tokens.
#[derive(Default)]
struct Counter {
    code: BTreeSet<usize>,
    tests: BTreeSet<usize>,
    test_modules: Vec<String>,
}

impl Counter {
    fn walk(&mut self, stream: TokenStream, is_test: bool) {
        let tokens: Vec<_> = stream.into_iter().collect();
        let mut rest = &tokens[..];
        while let Some(token) = rest.first() {
            if let Some(length) = doc_length(rest) {
                rest = &rest[length..];
                continue;
            }
            match attribute(rest) {
                Some(group) if is_cfg_test(group) => {
                    let end = end_of_item(rest);
                    self.test_modules.extend(module_of_a_file(&rest[..end]));
                    for token in &rest[..end] {
                        self.token(token, true);
                    }
                    rest = &rest[end..];
                }
                _ => {
                    self.token(token, is_test);
                    rest = &rest[1..];
                }
            }
        }
    }

    fn token(&mut self, token: &TokenTree, is_test: bool) {
        match token {
            TokenTree::Group(group) => {
                self.lines(group.span_open(), is_test);
                self.walk(group.stream(), is_test);
                self.lines(group.span_close(), is_test);
            }
            token => self.lines(token.span(), is_test),
        }
    }

    fn lines(&mut self, span: Span, is_test: bool) {
        let lines = if is_test {
            &mut self.tests
        } else {
            &mut self.code
        };
        lines.extend(span.start().line..=span.end().line);
    }
}

/// The number of tokens of the documentation at the beginning of `tokens`: `#[doc = ".."]` or `#![doc = ".."]`.
fn doc_length(tokens: &[TokenTree]) -> Option<usize> {
    let is_doc = |group: &Group| {
        let first = group.stream().into_iter().next();
        first.is_some_and(|word| word.to_string() == "doc")
    };
    match tokens {
        [TokenTree::Punct(hash), TokenTree::Group(group), ..] if hash.as_char() == '#' => {
            is_doc(group).then_some(2)
        }
        [
            TokenTree::Punct(hash),
            TokenTree::Punct(_),
            TokenTree::Group(group),
            ..,
        ] if hash.as_char() == '#' => is_doc(group).then_some(3),
        _ => None,
    }
}

/// The brackets of the outer attribute at the beginning of `tokens`.
fn attribute(tokens: &[TokenTree]) -> Option<&Group> {
    match tokens {
        [TokenTree::Punct(hash), TokenTree::Group(group), ..]
            if hash.as_char() == '#' && group.delimiter() == Delimiter::Bracket =>
        {
            Some(group)
        }
        _ => None,
    }
}

/// Whether it is `#[cfg(test)]` or `#[cfg(all(test, ..))]`.
fn is_cfg_test(attribute: &Group) -> bool {
    let text = attribute.stream().to_string().replace(' ', "");
    text == "cfg(test)" || text.starts_with("cfg(all(test,")
}

/// The number of tokens of the item at the beginning of `tokens`, with its attributes.
fn end_of_item(tokens: &[TokenTree]) -> usize {
    let mut start = 0;
    while attribute(&tokens[start..]).is_some() {
        start += 2;
    }
    let is_word = |token: &TokenTree, words: &[&str]| matches!(token, TokenTree::Ident(word) if words.iter().any(|it| word == it));
    let until_semicolon = ["use", "const", "static", "type", "let", "extern"];
    let until_braces = [
        "mod",
        "fn",
        "impl",
        "struct",
        "enum",
        "trait",
        "macro_rules",
        "unsafe",
    ];
    let both = [&until_semicolon[..], &until_braces].concat();
    let keyword = tokens[start..].iter().find(|token| is_word(token, &both));
    // A `const fn` or `extern "C" fn` ends with its braces.
    let is_fn = tokens[start..]
        .iter()
        .take(4)
        .any(|token| is_word(token, &["fn"]));
    let ends_with_braces = is_fn || keyword.is_some_and(|token| is_word(token, &until_braces));
    for (at, token) in tokens.iter().enumerate().skip(start) {
        let ends = match token {
            TokenTree::Punct(mark) => match keyword {
                Some(_) => mark.as_char() == ';',
                // A field, a variant or a value.
                None => mark.as_char() == ',',
            },
            TokenTree::Group(group) => ends_with_braces && group.delimiter() == Delimiter::Brace,
            _ => false,
        };
        if ends {
            return at + 1;
        }
    }
    tokens.len()
}

/// The name of the module if the item is `mod name;`.
fn module_of_a_file(item: &[TokenTree]) -> Option<String> {
    match item {
        [
            ..,
            TokenTree::Ident(keyword),
            TokenTree::Ident(name),
            TokenTree::Punct(_),
        ] if keyword == "mod" => Some(name.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &str) -> [usize; 3] {
        let file = CountedFile::new("a/src/b.rs".into(), text).unwrap();
        [file.code, file.tests, file.all]
    }

    #[test]
    fn comments_documentation_and_blanks_are_no_code() {
        let text = "//! Module.\n\n/// Item.\n#[inline]\nfn a() { // says why\n    /* more\n    text */\n    b(\"two\nlines\");\n}\n";
        assert_eq!(counted(text), [5, 0, 10]);
    }

    #[test]
    fn items_of_tests_are_counted_apart() {
        let text = "fn a() {}\n\n#[cfg(test)]\nuse b::{c, d};\n#[cfg(test)]\nconst fn e() {\n}\nfn f() {}\n\
                    #[cfg(all(test, unix))]\nmod tests {\n    //! Tests.\n    fn g() {}\n}\n";
        assert_eq!(counted(text), [2, 9, 13]);
        let fields = "struct A {\n    #[cfg(test)]\n    b: u8,\n    c: u8,\n}\n";
        assert_eq!(counted(fields), [3, 2, 5]);
    }

    #[test]
    fn modules_with_files_are_found() {
        let text = "#[cfg(test)]\npub(crate) mod harness;\n#[cfg(test)]\nmod tests {}\nmod c;\n";
        let names = |path: &str| {
            let file = CountedFile::new(path.into(), text).unwrap();
            file.test_modules().collect::<Vec<_>>()
        };
        assert_eq!(names("a/src/b.rs"), ["a/src/b/harness"]);
        assert_eq!(names("a/src/mod.rs"), ["a/src/harness"]);
    }

    #[test]
    fn a_file_without_tokens_of_rust_is_an_error() {
        let error = CountedFile::new("a/b.rs".into(), "fn a() {\n").unwrap_err();
        assert!(error.starts_with("a/b.rs:"), "{error}");
    }
}
