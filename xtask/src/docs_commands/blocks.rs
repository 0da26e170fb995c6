//! Reads the commands of a page: the lines of its code blocks with the language `sh`.

/// A command, or a script of several lines.
#[derive(Clone, Debug, PartialEq)]
pub struct DocsCommand {
    /// The page, relative to the repository.
    pub page: String,
    /// The line number of the first line in the page.
    pub line: usize,
    /// The text as the page prints it.
    pub text: String,
}

impl DocsCommand {
    /// Returns the text without comments and with single spaces, as in the list.
    pub fn name(&self) -> String {
        let lines = self.text.lines().map(without_comment);
        let words = lines.flat_map(|line| {
            line.split_whitespace()
                .map(str::to_string)
                .collect::<Vec<_>>()
        });
        let words: Vec<_> = words.filter(|word| word != "\\").collect();
        words.join(" ")
    }

    pub fn first_line(&self) -> &str {
        let first = self.text.lines().next().unwrap_or_default();
        without_comment(first).trim_end()
    }

    /// Returns whether the command starts ranks as processes.
    pub fn needs_mpi(&self) -> bool {
        let needs = ["mpirun ", "launch --ranks", "--features mpi"];
        needs.iter().any(|words| self.text.contains(words))
    }
}

/// Returns the commands of a page, in order. A block whose lines depend on each other is one command.
pub fn commands(page: &str, text: &str) -> Result<Vec<DocsCommand>, String> {
    let mut found = vec![];
    let mut block: Option<Vec<(usize, &str)>> = None;
    for (number, line) in (1..).zip(text.lines()) {
        match &mut block {
            None if line.trim() == "```sh" => block = Some(vec![]),
            None => {}
            Some(lines) if line.trim() == "```" => {
                found.extend(of_block(page, lines));
                block = None;
            }
            Some(lines) => lines.push((number, line)),
        }
    }
    match block {
        None => Ok(found),
        Some(_) => Err(format!("{page}: a code block has no end")),
    }
}

fn of_block(page: &str, lines: &[(usize, &str)]) -> Vec<DocsCommand> {
    let command = |lines: &[(usize, &str)]| DocsCommand {
        page: page.into(),
        line: lines[0].0,
        text: lines
            .iter()
            .map(|(_, line)| *line)
            .collect::<Vec<_>>()
            .join("\n"),
    };
    let lines: Vec<_> = lines
        .iter()
        .copied()
        .filter(|(_, line)| !line.trim().is_empty())
        .collect();
    let is_joined = |(_, line): &(usize, &str)| {
        let starts = ["#!", "export ", "for "];
        starts.iter().any(|start| line.starts_with(start))
            || without_comment(line).trim_end().ends_with(" &")
    };
    if lines.iter().any(is_joined) {
        return vec![command(&lines)];
    }
    let ends = |(_, line): &(usize, &str)| !line.trim_end().ends_with('\\');
    let commands = lines.split_inclusive(ends);
    let is_comment = |lines: &&[(usize, &str)]| {
        lines
            .iter()
            .all(|(_, line)| without_comment(line).trim().is_empty())
    };
    commands
        .filter(|lines| !is_comment(lines))
        .map(command)
        .collect()
}

/// Returns the line up to a comment. A `#` that begins a word outside of quotes begins a comment. `#!` and `#SBATCH`
/// do not begin a comment.
fn without_comment(line: &str) -> &str {
    if line.starts_with("#!") || line.starts_with("#SBATCH") {
        return line;
    }
    let (mut quote, mut before) = (None, ' ');
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') if before.is_whitespace() => return &line[..at],
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), _) if c == open => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let found = commands("page.md", text).unwrap();
        found.iter().map(DocsCommand::name).collect()
    }

    #[test]
    fn each_line_of_a_block_is_a_command() {
        let text = "```sh\na --b '# c'   # comment\n# comment\n\nd \\\n  e\n```\n```rust\nf\n```\n```sh\ng#h\n```\n";
        assert_eq!(names(text), ["a --b '# c'", "d e", "g#h"]);
        let found = commands("page.md", text).unwrap();
        assert_eq!((found[1].line, &found[1].text[..]), (5, "d \\\n  e"));
        assert_eq!(found[0].first_line(), "a --b '# c'");
    }

    #[test]
    fn lines_that_depend_on_each_other_are_one_command() {
        assert_eq!(names("```sh\nexport A=1\nb $A\n```\n"), ["export A=1 b $A"]);
        assert_eq!(names("```sh\na & # one\nb\n```\n"), ["a & b"]);
        assert_eq!(
            names("```sh\n#!/bin/bash\n#SBATCH -n 2\n\nsrun a\n```\n"),
            ["#!/bin/bash #SBATCH -n 2 srun a"]
        );
    }

    #[test]
    fn a_block_without_an_end_is_an_error() {
        assert!(commands("page.md", "```sh\na\n").is_err());
    }
}
