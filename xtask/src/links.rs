//! Finds the broken relative links of a Markdown file.

use std::fs;
use std::path::Path;

/// One link: the line it stands on, counted from 1, and where it leads.
#[derive(Debug, PartialEq)]
pub struct Link {
    /// The line, counted from 1.
    pub line: usize,
    /// The target as written.
    pub target: String,
}

/// The links of a Markdown text, inline (`[text](target)`) and by definition (`[name]: target`).
/// Code is skipped.
pub fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for (line, prose) in prose_lines(text) {
        let prose = without_code(prose);
        let targets = inline_targets(&prose).chain(defined_target(&prose));
        links.extend(targets.map(|target| Link {
            line,
            target: target.to_owned(),
        }));
    }
    links
}

/// The lines outside fenced code, counted from 1.
fn prose_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence: Option<&str> = None;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let start = line.trim_start();
        match fence {
            Some(mark) => {
                if start.starts_with(mark) {
                    fence = None;
                }
                false
            }
            None => {
                fence = ["```", "~~~"]
                    .into_iter()
                    .find(|mark| start.starts_with(mark));
                fence.is_none()
            }
        }
    })
}

/// A line with the insides of its `code` taken out.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

fn inline_targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(inside, _)| {
            // A title may follow the target.
            inside.split_whitespace().next().unwrap_or_default()
        })
}

fn defined_target(line: &str) -> Option<&str> {
    let (name, target) = line.strip_prefix('[')?.split_once("]: ")?;
    let footnote = name.starts_with('^');
    if footnote {
        None
    } else {
        target.split_whitespace().next()
    }
}

/// Why a link of `file` is broken; `None` if it resolves or is external.
pub fn problem(file: &Path, text: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, heading) = match target.split_once('#') {
        Some((path, heading)) => (path, Some(heading)),
        None => (target, None),
    };
    if path.is_empty() && heading.is_none() {
        return Some("the link is empty".into());
    }
    if path.starts_with('/') {
        return Some(format!("{target} is not a relative link"));
    }
    let linked = file.parent().unwrap_or(file).join(path);
    if !path.is_empty() && !linked.exists() {
        return Some(format!("{target} does not exist"));
    }
    let heading = heading?;
    let there = if path.is_empty() {
        text.to_owned()
    } else if linked.extension().is_some_and(|end| end == "md") {
        fs::read_to_string(&linked).unwrap_or_default()
    } else {
        return None;
    };
    let known = anchors(&there).iter().any(|anchor| anchor == heading);
    (!known).then(|| format!("{target}: no heading has this name"))
}

/// The names by which the headings of a text can be linked to, as mdBook and GitHub make them.
fn anchors(text: &str) -> Vec<String> {
    let headings = prose_lines(text).filter(|(_, line)| line.starts_with('#'));
    let mut anchors: Vec<String> = Vec::new();
    for (_, line) in headings {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        let kept = words
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let mut unique = name.clone();
        for count in 1.. {
            if !anchors.contains(&unique) {
                break;
            }
            unique = format!("{name}-{count}");
        }
        anchors.push(unique);
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    fn targets(text: &str) -> Vec<(usize, String)> {
        links(text)
            .into_iter()
            .map(|link| (link.line, link.target))
            .collect()
    }

    #[test]
    fn links_are_found_and_code_is_skipped() {
        let text = "\
See [`Mesh`](mesh.md) and ![a figure](img/a.svg \"title\").
`[not](code.md)` but [yes](b.md#here)
```text
[not](fenced.md)
```
[name]: c.md
[^1]: a footnote
Draft: [later]()
";
        let expected = [
            (1, "mesh.md"),
            (1, "img/a.svg"),
            (2, "b.md#here"),
            (6, "c.md"),
            (8, ""),
        ];
        assert_eq!(
            targets(text),
            expected.map(|(line, target)| (line, target.to_owned()))
        );
    }

    #[test]
    fn a_fence_ends_only_with_its_own_mark() {
        assert_eq!(
            targets("~~~\n```\n[not](a.md)\n~~~\n[yes](b.md)"),
            [(5, "b.md".to_owned())]
        );
    }

    #[test]
    fn headings_become_anchors() {
        let text = "# Rules of the library\n## What `axis` means: a word\n```\n# no heading\n```\n\
                    ## Rules of the library\n";
        assert_eq!(
            anchors(text),
            [
                "rules-of-the-library",
                "what-axis-means-a-word",
                "rules-of-the-library-1"
            ]
        );
    }

    #[test]
    fn what_leads_nowhere_is_named() {
        let folder = TempDir::new("links").unwrap();
        folder.write("b.md", "# Here\n");
        folder.write("sub/c.md", "");
        let text = "# Top\n";
        let file = folder.path().join("a.md");
        let of = |target| problem(&file, text, target);
        for good in [
            "b.md",
            "b.md#here",
            "sub/c.md",
            "sub",
            "#top",
            "https://burn.dev/x",
        ] {
            assert_eq!(of(good), None, "{good}");
        }
        for (bad, reason) in [
            ("gone.md", "gone.md does not exist"),
            ("b.md#gone", "b.md#gone: no heading has this name"),
            ("#gone", "#gone: no heading has this name"),
            ("/b.md", "/b.md is not a relative link"),
            ("", "the link is empty"),
        ] {
            assert_eq!(of(bad).as_deref(), Some(reason));
        }
    }
}
