//! Parsers of Slurm's compressed formats: the first host of a host list, and the number of tasks on each node.
//!
//! An example of a host list is `node[01-04,07],gpu3`. It consists of names, separated by commas. The brackets contain
//! numbers and ranges of numbers. All numbers of a range have the same number of digits as the first number of the
//! range, including leading zeros. If a name has several brackets, the last bracket varies fastest.

use super::vars::digits;

/// The error for a host list that does not have Slurm's format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeListError {
    /// The list is empty, or a name between two commas is empty.
    #[error("a host name is empty: expected a list such as node1 or node[01-04,07],gpu3")]
    NoName,
    /// The brackets are unbalanced or nested.
    #[error("unbalanced brackets in \"{0}\": expected a list such as node[01-04,07]")]
    Brackets(String),
    /// An item in the brackets is not a number or a range of numbers.
    #[error("invalid range \"{0}\": expected a range such as 3, 3-7 or 03-07")]
    Range(String),
}

/// Checks the complete list and returns the first host.
pub(super) fn first_host(text: &str) -> Result<String, NodeListError> {
    let names = split_outside_brackets(text)?.into_iter();
    let hosts: Vec<String> = names.map(first_of_name).collect::<Result<_, _>>()?;
    Ok(hosts.into_iter().next().unwrap_or_default())
}

fn split_outside_brackets(text: &str) -> Result<Vec<&str>, NodeListError> {
    let brackets = || NodeListError::Brackets(text.into());
    let (mut names, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, letter) in text.char_indices() {
        match (letter, inside) {
            ('[', true) | (']', false) => return Err(brackets()),
            ('[', false) => inside = true,
            (']', true) => inside = false,
            (',', false) => {
                names.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    names.push(&text[start..]);
    if inside {
        return Err(brackets());
    }
    Ok(names)
}

/// Returns the first host of a name with balanced brackets.
fn first_of_name(text: &str) -> Result<String, NodeListError> {
    if text.is_empty() {
        return Err(NodeListError::NoName);
    }
    let (mut host, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after
            .split_once(']')
            .ok_or_else(|| NodeListError::Brackets(text.into()))?;
        let numbers: Vec<&str> = inside
            .split(',')
            .map(first_of_range)
            .collect::<Result<_, _>>()?;
        host += before;
        host += numbers[0];
        rest = after;
    }
    Ok(host + rest)
}

/// Returns the first number of a range, with its leading zeros.
fn first_of_range(text: &str) -> Result<&str, NodeListError> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (digits::<u64>(first), digits(last)) {
        // Numbers in host names are short.
        (Some(low), Some(high)) if low <= high && high < u64::MAX && first.len() <= 20 => Ok(first),
        _ => Err(NodeListError::Range(text.into())),
    }
}

/// The number of tasks of a step on each node. In the compressed form, `4(x2),3` means `4, 4, 3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TasksPerNode(Vec<(usize, usize)>);

impl TasksPerNode {
    /// Parses the compressed form. Returns `None` if the text is not in Slurm's format.
    pub fn parse(text: &str) -> Option<TasksPerNode> {
        let counts: Option<Vec<_>> = text.split(',').map(parse_count).collect();
        let tasks = TasksPerNode(counts?);
        tasks.total_checked().is_some().then_some(tasks)
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.0.iter().map(|(_, nodes)| nodes).sum()
    }

    /// Returns the total number of tasks on all nodes.
    pub fn total(&self) -> usize {
        self.0.iter().map(|(tasks, nodes)| tasks * nodes).sum()
    }

    /// Returns the number of tasks on one node, or `None` if there is no such node.
    pub fn on(&self, mut node: usize) -> Option<usize> {
        for (tasks, nodes) in &self.0 {
            match node.checked_sub(*nodes) {
                None => return Some(*tasks),
                Some(rest) => node = rest,
            }
        }
        None
    }

    /// Returns the total number of tasks on all nodes, or `None` if the number of tasks or nodes overflows a `usize`.
    fn total_checked(&self) -> Option<usize> {
        self.0
            .iter()
            .try_fold(0usize, |sum, (_, nodes)| sum.checked_add(*nodes))?;
        self.0.iter().try_fold(0usize, |sum, (tasks, nodes)| {
            sum.checked_add(tasks.checked_mul(*nodes)?)
        })
    }
}

/// Parses `4(x2)` or `4`. Returns the number of tasks and the number of nodes.
fn parse_count(text: &str) -> Option<(usize, usize)> {
    match text.split_once("(x") {
        None => Some((digits(text)?, 1)),
        Some((tasks, nodes)) => Some((digits(tasks)?, digits(nodes.strip_suffix(')')?)?)),
    }
}
