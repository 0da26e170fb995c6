//! The extension of a file that may be compressed.

use std::path::Path;

/// Returns `gz` or `zst` if the file name has this extension.
pub fn compression(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?;
    ["gz", "zst"]
        .into_iter()
        .find(|packing| extension.eq_ignore_ascii_case(packing))
}

/// Returns the extension in lower case, ignoring the extension of a compression format.
pub fn extension(path: &Path) -> Option<String> {
    let name = match compression(path) {
        Some(_) => Path::new(path.file_stem()?),
        None => path,
    };
    Some(name.extension()?.to_str()?.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_files_have_the_extension_of_what_they_hold() {
        let of = |name: &str| extension(Path::new(name));
        assert_eq!(of("a/b.JSONL.gz").as_deref(), Some("jsonl"));
        assert_eq!(of("b.txt.ZST").as_deref(), Some("txt"));
        assert_eq!(of("b.md").as_deref(), Some("md"));
        assert_eq!(of("b.gz"), None);
    }
}
