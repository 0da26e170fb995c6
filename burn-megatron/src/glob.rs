//! Glob patterns for paths with dots, and the edit distance between a pattern and a path.

use std::iter::once;

/// The number of paths that an error lists.
const MAX_LISTED: usize = 3;

/// A pattern over the paths of parameters or layers. It matches complete paths.
///
/// `?` matches one character of a component, and `*` matches any characters of a component. `**` must be a
/// complete component and matches any number of components.
#[derive(Clone, Debug)]
pub(crate) struct Glob(Vec<GlobToken>);

#[derive(Clone, Debug)]
enum GlobToken {
    /// A literal character.
    Literal(char),
    /// `?`.
    One,
    /// `*`.
    Any,
    /// `**.`: any number of components, each with the dot after it.
    Components,
    /// `**` at the end: the rest of the path.
    Rest,
}

/// A syntax error of a glob pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GlobError {
    /// A component of the pattern is empty. Two dots follow each other, or the pattern begins or ends with a dot.
    #[error("it has an empty component: write names, *, ? or ** between dots")]
    EmptyComponent,
    /// A component of the pattern combines `**` with other characters.
    #[error("** has to stand alone between dots, as in **.bias; inside of a component use *")]
    Joined,
}

impl Glob {
    /// Parses a pattern.
    pub(crate) fn parse(pattern: &str) -> Result<Self, GlobError> {
        let mut tokens = vec![];
        let mut components = pattern.split('.').peekable();
        while let Some(component) = components.next() {
            let last = components.peek().is_none();
            match component {
                "" => return Err(GlobError::EmptyComponent),
                "**" if last => tokens.push(GlobToken::Rest),
                "**" => tokens.push(GlobToken::Components),
                joined if joined.contains("**") => return Err(GlobError::Joined),
                name => {
                    tokens.extend(name.chars().map(GlobToken::of));
                    tokens.extend((!last).then_some(GlobToken::Literal('.')));
                }
            }
        }
        Ok(Self(tokens))
    }

    /// Whether the pattern matches the path.
    pub(crate) fn matches(&self, path: &str) -> bool {
        self.distance(path) == 0
    }

    /// Returns the Levenshtein distance: the minimum number of characters to insert, delete or change in the
    /// pattern, so that it matches the path. Stars match at no cost.
    pub(crate) fn distance(&self, path: &str) -> usize {
        let path: Vec<char> = path.chars().collect();
        // Element `j` is the distance of the tokens so far to the first `j` characters.
        let mut row: Vec<usize> = (0..=path.len()).collect();
        for token in &self.0 {
            row = token.next_row(&row, &path);
        }
        row[path.len()]
    }
}

/// Returns the paths with the smallest distance, nearest first, up to the number of paths that an error lists.
pub(crate) fn nearest<'a>(glob: &Glob, paths: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut nearest: Vec<_> = paths.into_iter().collect();
    nearest.sort_by_cached_key(|path| glob.distance(path));
    nearest
        .into_iter()
        .take(MAX_LISTED)
        .map(Into::into)
        .collect()
}

/// Returns the end of an error message, which lists the nearest paths.
pub(crate) fn listed(nearest: &[String]) -> String {
    match nearest {
        [] => ": the model has none".into(),
        [one] => format!("; the nearest is {one}"),
        more => format!("; the nearest are {}", more.join(", ")),
    }
}

impl GlobToken {
    fn of(character: char) -> Self {
        match character {
            '*' => Self::Any,
            '?' => Self::One,
            other => Self::Literal(other),
        }
    }

    /// Returns the distances with this token, from the distances without it.
    fn next_row(&self, before: &[usize], path: &[char]) -> Vec<usize> {
        match self {
            Self::Literal(wanted) => edits(before, path, |found| found == *wanted),
            Self::One => edits(before, path, |found| found != '.'),
            Self::Any => {
                let mut best = before[0];
                let after = path.iter().zip(&before[1..]).map(|(found, without)| {
                    best = match found {
                        '.' => (best + 1).min(*without),
                        _ => best.min(*without),
                    };
                    best
                });
                once(before[0]).chain(after).collect()
            }
            Self::Components => {
                let mut best = before[0];
                let after = path.iter().zip(&before[1..]).map(|(found, without)| {
                    best = best.min(*without);
                    if *found == '.' { best } else { *without }
                });
                once(before[0]).chain(after).collect()
            }
            Self::Rest => {
                let least = before.iter().scan(usize::MAX, |least, without| {
                    *least = (*least).min(*without);
                    Some(*least)
                });
                least.collect()
            }
        }
    }
}

/// Returns the distances with one more token that matches one character.
fn edits(before: &[usize], path: &[char], fits: impl Fn(char) -> bool) -> Vec<usize> {
    let mut row = vec![before[0] + 1];
    for (j, found) in path.iter().enumerate() {
        let changed = before[j] + usize::from(!fits(*found));
        row.push(changed.min(before[j + 1] + 1).min(row[j] + 1));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn glob(pattern: &str) -> Glob {
        Glob::parse(pattern).expect("is a pattern")
    }

    #[test]
    fn patterns_fit_whole_paths() {
        let fits = [
            ("embedding.weight", "embedding.weight"),
            ("*.weight", "norm.weight"),
            ("blocks.*.norm?.weight", "blocks.11.norm1.weight"),
            ("blocks.1*.mlp.*.bias", "blocks.12.mlp.up.bias"),
            ("**.bias", "bias"),
            ("**.bias", "blocks.0.mlp.up.bias"),
            ("blocks.**", "blocks.0.mlp.up.bias"),
            ("blocks.**.bias", "blocks.bias"),
            ("**.mlp.**.weight", "blocks.0.mlp.up.weight"),
            ("**", "embedding.weight"),
            ("**.*norm*.**", "blocks.3.final_norm.weight"),
            ("**.größe", "blöcke.größe"),
        ];
        for (pattern, path) in fits {
            assert!(glob(pattern).matches(path), "{pattern} {path}");
        }
        let fits_not = [
            ("embedding", "embedding.weight"),
            ("weight", "embedding.weight"),
            ("*", "embedding.weight"),
            ("*.weight", "blocks.0.weight"),
            ("blocks.?.bias", "blocks.10.bias"),
            ("blocks?0.bias", "blocks.0.bias"),
            ("embedding.weigh", "embedding.weight"),
            ("**.bias", "blocks.0.unbias"),
            ("**.bias", "blocks.bias.weight"),
            ("blocks.**", "blocks2.0.bias"),
            ("blocks.**", "blocks"),
            ("Embedding.weight", "embedding.weight"),
        ];
        for (pattern, path) in fits_not {
            assert!(!glob(pattern).matches(path), "{pattern} {path}");
        }
    }

    #[test]
    fn patterns_that_mean_nothing_are_refused() {
        for pattern in ["", ".", "a.", ".a", "a..b"] {
            let fault = Glob::parse(pattern).err();
            assert_eq!(fault, Some(GlobError::EmptyComponent), "{pattern}");
        }
        for pattern in ["**bias", "blocks**", "a.***.b", "a.b**c"] {
            let fault = Glob::parse(pattern).err();
            assert_eq!(fault, Some(GlobError::Joined), "{pattern}");
        }
    }

    /// Evaluates a pattern component by component.
    fn meaning(pattern: &[&str], path: &[&str]) -> bool {
        match (pattern, path) {
            ([], []) => true,
            (["**"], _) => !path.is_empty(),
            (["**", rest @ ..], _) => {
                meaning(rest, path) || path.split_first().is_some_and(|(_, p)| meaning(pattern, p))
            }
            ([component, rest @ ..], [name, names @ ..]) => {
                of_component(component.as_bytes(), name.as_bytes()) && meaning(rest, names)
            }
            _ => false,
        }
    }

    fn of_component(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern, name) {
            ([], []) => true,
            ([b'*', rest @ ..], _) => {
                of_component(rest, name)
                    || name
                        .split_first()
                        .is_some_and(|(_, n)| of_component(pattern, n))
            }
            ([b'?', rest @ ..], [_, names @ ..]) => of_component(rest, names),
            ([wanted, rest @ ..], [found, names @ ..]) => {
                wanted == found && of_component(rest, names)
            }
            _ => false,
        }
    }

    /// Returns all paths of one to `longest` of these components.
    fn paths<'a>(components: &[&'a str], longest: usize) -> Vec<Vec<&'a str>> {
        let mut all: Vec<Vec<&str>> = vec![vec![]];
        let mut from = 0;
        for _ in 0..longest {
            let until = all.len();
            for i in from..until {
                for component in components {
                    all.push(all[i].iter().chain([component]).copied().collect());
                }
            }
            from = until;
        }
        all.split_off(1)
    }

    #[test]
    fn every_small_pattern_has_its_meaning() {
        let patterns = paths(&["a", "ab", "*", "?", "a*", "*b", "?*", "**"], 3);
        let paths = paths(&["a", "b", "ab", "aab"], 4);
        let mut fitting = 0;
        for pattern in &patterns {
            let glob = glob(&pattern.join("."));
            for path in &paths {
                let expected = meaning(pattern, path);
                fitting += usize::from(expected);
                assert_eq!(
                    glob.matches(&path.join(".")),
                    expected,
                    "{pattern:?} {path:?}"
                );
            }
        }
        assert!(fitting > 10_000, "{fitting} of them fit");
    }

    #[test]
    fn distances_are_those_of_levenshtein_and_stars_fit_for_nothing() {
        let distances = [
            ("kitten", "sitting", 3),
            ("bias", "bais", 2),
            ("wieght", "weight", 2),
            ("a", "abcd", 3),
            ("abcd", "a", 3),
            ("**.bais", "blocks.0.mlp.up.bias", 2),
            ("block.*.mlp.up.weight", "blocks.17.mlp.up.weight", 1),
            ("*.weight", "blocks.0.weight", 1),
            ("blocks.??.bias", "blocks.0.bias", 1),
            ("blocs.**", "blocks.0.mlp.up.bias", 1),
        ];
        for (pattern, path, distance) in distances {
            assert_eq!(glob(pattern).distance(path), distance, "{pattern} {path}");
        }
    }
}
