//! `cargo xtask check circles`: finds files of a crate that import each other in a circle.
//!
//! A file imports another file by `use` or by a path that begins with `crate`, `self` or `super`. An item that a
//! module re-exports counts as an import of the file that defines the item. Re-exports are not counted as imports.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree, VisRestricted, Visibility, parse_quote};

use crate::lines::product_files;

/// The maximum number of files in a circle.
const LARGEST: usize = 6;

/// The path of a module in its crate.
type Module = Vec<String>;

/// Checks the largest circle of each crate, and prints it.
///
/// # Errors
/// Returns the files of each circle that is too large, and the files that cannot be read.
pub fn run(root: &Path) -> Result<(), String> {
    let mut crates: BTreeMap<String, Vec<(Module, String)>> = BTreeMap::new();
    for (path, _) in product_files(root)? {
        if let Some((folder, module)) = place(&path) {
            let text = fs::read_to_string(root.join(&path)).map_err(|e| format!("{path}: {e}"))?;
            crates.entry(folder).or_default().push((module, text));
        }
    }
    let mut faults = vec![];
    for (folder, files) in &crates {
        let circle = largest_circle(files).map_err(|error| format!("{folder}: {error}"))?;
        println!("{folder}: {} files, {LARGEST} allowed", circle.len());
        if circle.len() > LARGEST {
            faults.push(format!(
                "{folder}: {} files import each other; the limit is {LARGEST}: {}",
                circle.len(),
                circle.join(", ")
            ));
        }
    }
    match &faults[..] {
        [] => Ok(()),
        _ => Err(faults.join("\n")),
    }
}

/// Returns the folder of the crate of a file, and the file's module.
fn place(path: &str) -> Option<(String, Module)> {
    let (folder, file) = path.split_once("/src/")?;
    let mut module: Module = file
        .trim_end_matches(".rs")
        .split('/')
        .map(String::from)
        .collect();
    if module
        .last()
        .is_some_and(|name| ["mod", "lib", "main"].contains(&&name[..]))
    {
        module.pop();
    }
    Some((folder.into(), module))
}

/// Returns the modules of the largest circle of a crate. The list is empty if the crate has no circle.
fn largest_circle(files: &[(Module, String)]) -> Result<Vec<String>, String> {
    let mut modules: BTreeMap<&Module, Imports> = BTreeMap::new();
    for (module, text) in files {
        let file = syn::parse_file(text).map_err(|error| format!("{}: {error}", name(module)))?;
        // The library and the program of a crate are both the root of the crate.
        modules.entry(module).or_default().visit_file(&file);
    }
    let crate_modules = CrateModules { modules };
    let mut graph = DiGraphMap::<&Module, ()>::new();
    for (module, imports) in &crate_modules.modules {
        for path in &imports.uses {
            let absolute = crate_modules.absolute(module, path);
            if let Some(imported) = absolute.and_then(|path| crate_modules.defines(path, 0))
                && imported != *module
            {
                graph.add_edge(module, imported, ());
            }
        }
    }
    let largest = tarjan_scc(&graph).into_iter().max_by_key(Vec::len);
    let largest = largest
        .filter(|circle| circle.len() > 1)
        .unwrap_or_default();
    let mut names: Vec<_> = largest.into_iter().map(name).collect();
    names.sort();
    Ok(names)
}

fn name(module: &Module) -> String {
    if module.is_empty() {
        "lib".into()
    } else {
        module.join("/")
    }
}

/// The paths that a file imports, and the paths that it re-exports.
#[derive(Default)]
struct Imports {
    uses: Vec<Module>,
    exports: Vec<Module>,
}

impl Visit<'_> for Imports {
    fn visit_item(&mut self, item: &Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &vec![],
        };
        let is_test = |of: &Attribute| *of == parse_quote!(#[cfg(test)]);
        if !attributes.iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        let paths = match item.vis {
            Visibility::Inherited => &mut self.uses,
            _ => &mut self.exports,
        };
        leaves(&item.tree, &mut vec![], paths);
    }

    // `pub(super)` is not an import.
    fn visit_vis_restricted(&mut self, _: &VisRestricted) {}

    fn visit_path(&mut self, path: &syn::Path) {
        let segments = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        let segments: Module = segments.collect();
        if ["crate", "self", "super"].contains(&&segments[0][..]) {
            self.uses.push(segments);
        }
        visit::visit_path(self, path);
    }
}

/// Adds the paths of a tree to `paths`. A renamed item is added under its own name.
fn leaves(tree: &UseTree, before: &mut Module, paths: &mut Vec<Module>) {
    let leaf = |ident: &syn::Ident| before.iter().cloned().chain([ident.to_string()]).collect();
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            leaves(&path.tree, before, paths);
            before.pop();
        }
        UseTree::Name(item) => paths.push(leaf(&item.ident)),
        UseTree::Rename(item) => paths.push(leaf(&item.ident)),
        UseTree::Glob(_) => paths.push(before.clone()),
        UseTree::Group(group) => {
            let trees = group.items.iter();
            trees.for_each(|tree| leaves(tree, before, paths));
        }
    }
}

struct CrateModules<'a> {
    modules: BTreeMap<&'a Module, Imports>,
}

impl CrateModules<'_> {
    /// Returns a path of `module` from the root of the crate, or `None` for a path into another crate.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<Module> {
        let mut base = module.clone();
        let mut rest = path;
        match &path[0][..] {
            "crate" => return Some(path[1..].to_vec()),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            child => {
                base.push(child.into());
                if !self.modules.contains_key(&base) {
                    return None;
                }
                rest = &path[1..];
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// Returns the module that defines the item of an absolute path, after at most `8 - depth` re-exports.
    fn defines(&self, path: Module, depth: usize) -> Option<&Module> {
        let within = (0..=path.len()).rev().map(|end| &path[..end]);
        let (module, imports) = within
            .filter_map(|start| {
                let found = self.modules.get_key_value(&start.to_vec())?;
                Some((*found.0, found.1))
            })
            .next()?;
        let Some(item) = path.get(module.len()) else {
            return Some(module);
        };
        let export = imports
            .exports
            .iter()
            .find(|export| export.last() == Some(item));
        let Some(mut target) = export.and_then(|export| self.absolute(module, export)) else {
            return Some(module);
        };
        target.extend_from_slice(&path[module.len() + 1..]);
        if depth == 8 || target == path {
            return Some(module);
        }
        self.defines(target, depth + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(texts: &[(&str, &str)]) -> Vec<(Module, String)> {
        let place = |path: &str| super::place(&format!("a/src/{path}")).unwrap().1;
        texts
            .iter()
            .map(|(path, text)| (place(path), (*text).into()))
            .collect()
    }

    #[test]
    fn a_circle_goes_by_use_by_paths_and_through_exports() {
        let circle = files(&[
            ("lib.rs", "mod a; mod b; mod c; mod d;"),
            ("a.rs", "use crate::b::{X, Y as Z};"),
            // `c` defines `X`.
            ("b/mod.rs", "mod e; pub use super::c::X; pub use e::Y;"),
            ("b/e.rs", "pub struct Y;"),
            ("c.rs", "fn f() { super::d::g() }"),
            ("d.rs", "use super::a; #[cfg(test)] use crate::e::E;"),
            (
                "e.rs",
                "use crate::a::A; #[cfg(test)] mod tests { use super::d; }",
            ),
        ]);
        assert_eq!(largest_circle(&circle).unwrap(), ["a", "c", "d"]);
    }

    #[test]
    fn imports_without_a_way_back_are_no_circle() {
        let order = files(&[
            ("lib.rs", "pub mod a; pub use a::b::B;"),
            (
                "a/mod.rs",
                "pub mod b; pub use b::B; use std::fmt; use self::b::C;",
            ),
            (
                "a/b.rs",
                "pub(super) struct B; pub struct C; use other::a::mod_;",
            ),
        ]);
        assert_eq!(largest_circle(&order).unwrap(), [""; 0]);
    }
}
