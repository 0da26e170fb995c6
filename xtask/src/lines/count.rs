//! Counts the lines of a Rust file that contain code.

use std::collections::BTreeSet;

use super::tokens::{Token, tokens};

/// A file and its line counts.
#[derive(Debug)]
pub struct CountedFile {
    /// The path, relative to the repository.
    pub path: String,
    /// Lines with code. Comments, documentation, blank lines and test items are not counted.
    pub code: usize,
    /// Lines of items with `#[cfg(test)]`, without comments and blank lines.
    pub tests: usize,
    /// All lines.
    pub all: usize,
    /// The text without test items.
    pub untested: String,
    /// Names of the modules that are declared with `#[cfg(test)]` and have their own files.
    test_modules: Vec<String>,
}

impl CountedFile {
    /// Counts the lines of `text`.
    pub fn new(path: String, text: &str) -> Self {
        let tokens = tokens(text);
        let (mut code, mut tests) = (BTreeSet::new(), BTreeSet::new());
        let mut test_modules = vec![];
        let mut at = 0;
        while at < tokens.len() {
            let rest = &tokens[at..];
            if is_cfg_test(rest) {
                let item = &rest[..item_length(rest)];
                test_modules.extend(module_of_a_file(item));
                tests.extend(item.iter().flat_map(Token::lines));
                at += item.len();
            } else {
                code.extend(rest[0].lines());
                at += 1;
            }
        }
        let tests: BTreeSet<usize> = tests.difference(&code).copied().collect();
        let lines = (1..).zip(text.lines());
        let untested = lines.filter(|(number, _)| !tests.contains(number));
        Self {
            code: code.len(),
            tests: tests.len(),
            all: text.lines().count(),
            untested: untested.fold(String::new(), |text, (_, line)| text + line + "\n"),
            test_modules,
            path,
        }
    }

    /// Returns the paths of the test modules, without the extension `.rs`.
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

/// Returns the number of tokens of the attribute at the beginning of `tokens`, or 0 without an attribute.
fn attribute_length(tokens: &[Token]) -> usize {
    match tokens {
        [hash, bracket, ..] if hash.text == "#" && bracket.text == "[" => {
            1 + group_length(&tokens[1..])
        }
        _ => 0,
    }
}

/// Returns the number of tokens up to the bracket that closes the first token.
fn group_length(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        depth += nesting(token);
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// Returns the change of the bracket depth.
fn nesting(token: &Token) -> isize {
    match token.text {
        "(" | "[" | "{" => 1,
        ")" | "]" | "}" => -1,
        _ => 0,
    }
}

/// Returns whether the tokens begin with `#[cfg(test)]` or `#[cfg(all(test, ..))]`.
fn is_cfg_test(tokens: &[Token]) -> bool {
    let attribute = &tokens[..attribute_length(tokens)];
    let text: String = attribute.iter().map(|token| token.text).collect();
    text == "#[cfg(test)]" || text.starts_with("#[cfg(all(test,")
}

/// Returns the number of tokens of the item at the beginning of `tokens`, with its attributes.
fn item_length(tokens: &[Token]) -> usize {
    let mut start = 0;
    while let attribute @ 1.. = attribute_length(&tokens[start..]) {
        start += attribute;
    }
    let first = tokens[start..].iter().take(8);
    let ending = first.map(|token| Ending::of(token.text)).max();
    let mut at = start;
    while at < tokens.len() {
        let token = &tokens[at];
        let length = match nesting(token) {
            1 => group_length(&tokens[at..]),
            // The item is the last item of a list.
            -1 => return at,
            _ => 1,
        };
        at += length;
        let ends = match ending.unwrap_or(Ending::Comma) {
            Ending::Comma => token.text == ",",
            Ending::Semicolon => token.text == ";",
            Ending::Braces => matches!(token.text, ";" | "{"),
        };
        if ends {
            return at;
        }
    }
    tokens.len()
}

/// The end of an item, by the words at its beginning. For `const fn`, the second word decides.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    /// The end of a field, a variant or a value.
    Comma,
    Semicolon,
    /// Braces, or a semicolon if there are no braces.
    Braces,
}

impl Ending {
    fn of(word: &str) -> Self {
        match word {
            "use" | "const" | "static" | "type" | "let" | "extern" => Self::Semicolon,
            "mod" | "fn" | "impl" | "struct" | "enum" | "trait" | "macro_rules" => Self::Braces,
            _ => Self::Comma,
        }
    }
}

/// Returns the name of the module if the item is `mod name;`.
fn module_of_a_file(item: &[Token]) -> Option<String> {
    match item {
        [.., keyword, name, end] if keyword.text == "mod" && end.text == ";" => {
            Some(name.text.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &str) -> [usize; 3] {
        let file = CountedFile::new("a/src/b.rs".into(), text);
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
    fn the_last_item_of_a_list_ends_with_the_list() {
        let text = "enum A {\n    B,\n    #[cfg(test)]\n    C(u8)\n}\nfn d() {}\n";
        assert_eq!(counted(text), [4, 2, 6]);
        let quoted =
            "fn a() -> char {\n    let _ = \"#[cfg(test)] {\";\n    '{'\n}\nfn b<'a>() {}\n";
        assert_eq!(counted(quoted), [5, 0, 5]);
    }

    #[test]
    fn modules_with_files_are_found() {
        let text = "#[cfg(test)]\npub(crate) mod harness;\n#[cfg(test)]\nmod tests {}\nmod c;\n";
        let names = |path: &str| {
            let file = CountedFile::new(path.into(), text);
            file.test_modules().collect::<Vec<_>>()
        };
        assert_eq!(names("a/src/b.rs"), ["a/src/b/harness"]);
        assert_eq!(names("a/src/mod.rs"), ["a/src/harness"]);
    }
}
