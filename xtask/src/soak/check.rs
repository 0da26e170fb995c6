//! Checks after a disturbance: which checkpoints must exist, and which files must not change.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

/// Returns the steps of the checkpoints that a run has published.
pub fn checkpoints(run: &Path) -> Result<Vec<u64>, String> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(run.join("checkpoints")).into_iter().flatten() {
        let name = entry.map_err(|error| error.to_string())?.file_name();
        let name = name.to_string_lossy();
        let Some(rest) = name.strip_prefix("step-") else {
            continue;
        };
        match rest.parse() {
            Ok(step) => steps.push(step),
            Err(_) => return Err(format!("a checkpoint was set aside: {name}")),
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Compares the checkpoints `before` and `after` a disturbance of a run that keeps `kept` checkpoints. Returns a
/// message if checkpoints are lost.
pub fn lost(before: &[u64], after: &[u64], kept: usize) -> Option<String> {
    let newest = |steps: &[u64]| steps.last().copied();
    let gone = match kept {
        usize::MAX => before.iter().any(|step| !after.contains(step)),
        kept => after.len() < kept.min(before.len()),
    };
    (gone || newest(after) < newest(before))
        .then(|| format!("checkpoints are lost: {before:?} before, {after:?} after"))
}

/// The paths of files, links and folders, each with a hash of its content.
#[derive(Debug, PartialEq)]
pub struct FileTree(BTreeMap<PathBuf, u64>);

impl FileTree {
    /// Reads all files in `folder`, except the entries `but`.
    pub fn of(folder: &Path, but: &[&str]) -> std::io::Result<Self> {
        let mut tree = BTreeMap::new();
        let mut folders = vec![folder.to_path_buf()];
        while let Some(here) = folders.pop() {
            for entry in fs::read_dir(&here)? {
                let entry = entry?;
                let (path, kind) = (entry.path(), entry.file_type()?);
                let left_out = but.iter().any(|name| entry.file_name() == *name);
                if here == folder && left_out {
                    continue;
                }
                let mut hasher = DefaultHasher::new();
                if kind.is_symlink() {
                    fs::read_link(&path)?.hash(&mut hasher);
                } else if kind.is_dir() {
                    folders.push(path.clone());
                } else {
                    fs::read(&path)?.hash(&mut hasher);
                }
                tree.insert(path, hasher.finish());
            }
        }
        Ok(Self(tree))
    }

    /// Returns the first path that differs from `before`.
    pub fn first_change(&self, before: &Self) -> Option<String> {
        let paths = self.0.keys().chain(before.0.keys());
        let mut changed = paths.filter(|path| self.0.get(*path) != before.0.get(*path));
        let path = changed.next()?;
        Some(format!(
            "changed outside of the run folder: {}",
            path.display()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn what_is_lost_is_told() {
        let all = usize::MAX;
        assert_eq!(lost(&[2, 4], &[2, 4, 6], all), None);
        assert_eq!(lost(&[2, 4], &[4, 6], 2), None);
        assert_eq!(lost(&[], &[], 1), None);
        assert!(lost(&[2, 4], &[4, 6], all).is_some());
        assert!(lost(&[2, 4], &[6], 2).is_some());
        assert!(lost(&[2, 4], &[2], 1).is_some());
        assert!(lost(&[2], &[], 1).is_some());
    }

    #[test]
    fn checkpoints_are_listed_and_those_put_aside_told() {
        let folder = TempDir::new("soak-check").unwrap();
        assert_eq!(checkpoints(folder.path()), Ok(vec![]));
        for name in ["step-00000010", "step-00000004", ".saving-step-00000012"] {
            folder.write(&format!("checkpoints/{name}/manifest.json"), "{}");
        }
        assert_eq!(checkpoints(folder.path()), Ok(vec![4, 10]));
        folder.write(
            "checkpoints/step-00000012.unreadable-eio/manifest.json",
            "{}",
        );
        assert!(checkpoints(folder.path()).is_err());
    }

    #[test]
    fn what_is_touched_is_told_but_for_the_run() {
        let folder = TempDir::new("soak-tree").unwrap();
        folder.write("beside/a.txt", "a");
        let tree = || FileTree::of(folder.path(), &["run"]).unwrap();
        let before = tree();
        folder.write("run/metrics.jsonl", "{}");
        assert_eq!(tree().first_change(&before), None);
        folder.write("beside/a.txt", "b");
        assert!(
            tree()
                .first_change(&before)
                .unwrap()
                .ends_with("beside/a.txt")
        );
        folder.write("beside/a.txt", "a");
        folder.write("beside/run", "new");
        assert!(
            tree()
                .first_change(&before)
                .unwrap()
                .ends_with("beside/run")
        );
    }
}
