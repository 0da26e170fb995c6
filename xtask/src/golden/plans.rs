//! Plans of the published recipes, each in the layout of the recipe.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value};

/// The folder of the recipes, relative to the repository.
const RECIPES: &str = "examples/recipes";

/// The device of the plans.
const DEVICE: &str = "H100";

/// Recipes whose layout cannot be planned: the search does not support their split of layers, or adapters.
const UNPLANNED: [&str; 3] = ["deepseek-v3", "deepseek-v3-tiny", "lora"];

/// Returns the plans by the names of the recipes, without [`UNPLANNED`].
///
/// # Errors
///
/// Returns an error with the output of the program if a recipe cannot be planned.
pub fn of_recipes(program: &Path, root: &Path) -> Result<Value, String> {
    let folder = root.join(RECIPES);
    let entries = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|it| it == "toml"))
        .collect();
    paths.sort();
    let mut plans = Map::new();
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        if UNPLANNED.contains(&&name[..]) {
            continue;
        }
        let found = plan(program, root, &path).map_err(|error| format!("{name}: {error}"))?;
        plans.insert(name.into(), found);
    }
    println!("{} recipes", plans.len());
    Ok(Value::Object(plans))
}

fn plan(program: &Path, root: &Path, recipe: &Path) -> Result<Value, String> {
    let output = Command::new(program)
        .current_dir(root)
        .args([
            "plan",
            "--json",
            "--own-layout",
            "--devices",
            DEVICE,
            "--recipe",
        ])
        .arg(recipe)
        .output()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    serde_json::from_slice(&output.stdout).map_err(|error| {
        let messages = String::from_utf8_lossy(&output.stderr);
        format!("{}: {error}: {}", output.status, messages.trim())
    })
}
