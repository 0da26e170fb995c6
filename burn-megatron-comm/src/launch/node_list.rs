//! Slurm's short forms: lists of hosts, and numbers of tasks.
//!
//! A list of hosts is `node[01-04,07],gpu3`: names that commas part, in which brackets hold numbers
//! and ranges of numbers. The zeros in front of the first number of a range say how wide its numbers
//! are. Several brackets in a name count like digits, the last one the fastest.

/// A list of hosts, kept short: hosts are made as they are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeList(Vec<Vec<Part>>);

/// A list that Slurm does not write so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeListError {
    /// A list, or a place between two commas, without a name.
    #[error("a host has no name; node1 or node[01-04,07],gpu3 would fit")]
    NoName,
    /// Brackets that are not in pairs, or inside of each other.
    #[error("the brackets of \"{0}\" are not in pairs; node[01-04,07] would fit")]
    Brackets(String),
    /// What is between two commas in brackets.
    #[error("\"{0}\" is no range of numbers; 3, 3-7 or 03-07 would fit")]
    Range(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Numbers(Vec<Range>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    first: u64,
    last: u64,
    width: usize,
}

impl NodeList {
    /// Reads the whole list.
    pub fn parse(text: &str) -> Result<NodeList, NodeListError> {
        split_outside_brackets(text)?
            .into_iter()
            .map(parse_name)
            .collect::<Result<_, _>>()
            .map(NodeList)
    }

    /// The hosts in the order of the list.
    pub fn hosts(&self) -> impl Iterator<Item = String> {
        self.0
            .iter()
            .flat_map(|parts| (0..choices(parts)).map(|index| name(parts, index)))
    }
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
    match inside {
        true => Err(brackets()),
        false => Ok(names),
    }
}

/// A name whose brackets are in pairs.
fn parse_name(text: &str) -> Result<Vec<Part>, NodeListError> {
    if text.is_empty() {
        return Err(NodeListError::NoName);
    }
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after
            .split_once(']')
            .ok_or_else(|| NodeListError::Brackets(text.into()))?;
        parts.push(Part::Text(before.into()));
        let ranges = inside.split(',').map(parse_range);
        parts.push(Part::Numbers(ranges.collect::<Result<_, _>>()?));
        rest = after;
    }
    parts.push(Part::Text(rest.into()));
    Ok(parts)
}

fn parse_range(text: &str) -> Result<Range, NodeListError> {
    let wrong = || NodeListError::Range(text.into());
    let number = |digits: &str| match digits.bytes().all(|byte| byte.is_ascii_digit()) {
        true => digits.parse::<u64>().map_err(|_| wrong()),
        false => Err(wrong()),
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = Range {
        first: number(first)?,
        last: number(last)?,
        width: first.len(),
    };
    // No host has more digits, and their number must be one that can be counted.
    match range.first <= range.last && range.last < u64::MAX && range.width <= 20 {
        true => Ok(range),
        false => Err(wrong()),
    }
}

impl Range {
    fn len(&self) -> u64 {
        self.last - self.first + 1
    }
}

/// How many hosts a name stands for.
fn choices(parts: &[Part]) -> u64 {
    parts.iter().map(Part::choices).fold(1, u64::saturating_mul)
}

impl Part {
    fn choices(&self) -> u64 {
        match self {
            Part::Text(_) => 1,
            Part::Numbers(ranges) => ranges.iter().map(Range::len).fold(0, u64::saturating_add),
        }
    }

    fn text(&self, mut index: u64) -> String {
        let ranges = match self {
            Part::Text(text) => return text.clone(),
            Part::Numbers(ranges) => ranges,
        };
        for range in ranges {
            if index < range.len() {
                return format!("{:0width$}", range.first + index, width = range.width);
            }
            index -= range.len();
        }
        String::new()
    }
}

/// The host at `index` of those that a name stands for.
fn name(parts: &[Part], mut index: u64) -> String {
    let mut texts: Vec<String> = Vec::with_capacity(parts.len());
    for part in parts.iter().rev() {
        texts.push(part.text(index % part.choices()));
        index /= part.choices();
    }
    texts.reverse();
    texts.concat()
}

/// The tasks of a step on each node, from the short form `4(x2),3`, which is `4, 4, 3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TasksPerNode(Vec<(usize, usize)>);

impl TasksPerNode {
    /// `None` for what Slurm does not write so.
    pub fn parse(text: &str) -> Option<TasksPerNode> {
        let counts: Option<Vec<_>> = text.split(',').map(parse_count).collect();
        let tasks = TasksPerNode(counts?);
        tasks.total_checked().is_some().then_some(tasks)
    }

    /// The nodes of the step.
    pub fn nodes(&self) -> usize {
        self.0.iter().map(|(_, nodes)| nodes).sum()
    }

    /// The tasks on all of them.
    pub fn total(&self) -> usize {
        self.0.iter().map(|(tasks, nodes)| tasks * nodes).sum()
    }

    /// The tasks on one of them.
    pub fn on(&self, mut node: usize) -> Option<usize> {
        for (tasks, nodes) in &self.0 {
            match node.checked_sub(*nodes) {
                None => return Some(*tasks),
                Some(rest) => node = rest,
            }
        }
        None
    }

    /// `None` where the tasks or the nodes are too many to count.
    fn total_checked(&self) -> Option<usize> {
        self.0
            .iter()
            .try_fold(0usize, |sum, (_, nodes)| sum.checked_add(*nodes))?;
        self.0.iter().try_fold(0usize, |sum, (tasks, nodes)| {
            sum.checked_add(tasks.checked_mul(*nodes)?)
        })
    }
}

/// `4(x2)` or `4` as tasks and nodes.
fn parse_count(text: &str) -> Option<(usize, usize)> {
    let number = |digits: &str| match digits.bytes().all(|byte| byte.is_ascii_digit()) {
        true => digits.parse::<usize>().ok(),
        false => None,
    };
    match text.split_once("(x") {
        None => Some((number(text)?, 1)),
        Some((tasks, nodes)) => Some((number(tasks)?, number(nodes.strip_suffix(')')?)?)),
    }
}
