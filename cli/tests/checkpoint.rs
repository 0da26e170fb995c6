//! Tests `burn-megatron checkpoint` as a process.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use burn_megatron::checkpoint::{
    CheckpointFolder, CheckpointMetadata, ElementType, Retention, TensorMeta, TensorShard,
    TensorSlice,
};

/// Saves two tensors, the first in two pieces. `first` is the first element.
fn save(path: &Path, first: f32) {
    let tensor = |key: &str, shape: &[usize]| TensorMeta {
        key: key.into(),
        dtype: ElementType::F32,
        shape: shape.to_vec(),
    };
    let half = |at| TensorShard {
        tensor: tensor("model/weight", &[4, 2]),
        slice: TensorSlice {
            offset: vec![at, 0],
            shape: vec![2, 2],
        },
    };
    let moment = TensorShard {
        tensor: tensor("adamw.first/weight", &[3]),
        slice: TensorSlice::whole(&[3]),
    };
    let folder = CheckpointFolder::create(path).unwrap();
    let draft = folder.begin(100).unwrap();
    let data = |values: &[f32]| {
        values
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let object = [("scale".to_string(), vec![1, 2, 3])];
    let values = |index| match index {
        0 => Ok(data(&[first, 2.0, 3.0, 4.0])),
        _ => Ok(data(&[0.5, 0.25, 0.125])),
    };
    draft
        .write_part(0, &[half(0), moment], &object, values)
        .unwrap();
    let values = |_| Ok(data(&[5.0, 6.0, 7.0, 8.0]));
    draft.write_part(1, &[half(2)], &[], values).unwrap();
    let about = CheckpointMetadata {
        step: 100,
        samples: 1600,
        layout: "data 2".into(),
        config: serde_json::json!({"train": {"seed": 1}}),
        state: serde_json::Value::Null,
    };
    let wait = Duration::from_secs(20);
    draft
        .publish(2, &about, &Retention::default(), wait)
        .unwrap();
}

/// Runs the command. Returns the exit code, standard output and standard error.
fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    let output = command.arg("checkpoint").args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap();
    (code, text(&output.stdout), text(&output.stderr))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn inspect_says_what_is_there() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    save(path, 1.0);
    let (code, out, error) = run(&["inspect", text(path), "--tensors"]);
    assert_eq!((code, &error[..]), (0, ""));
    let lines = [
        "step        100",
        "samples     1,600",
        "layout      data 2",
        "tensors     2, 11 elements in 3 pieces",
        "objects     1",
        "adamw.first  1 tensor  12 B",
        "model/weight        f32     [4, 2]  32 B  2 pieces",
        "scale               object          3 B",
    ];
    for line in lines {
        assert!(out.lines().any(|found| found == line), "{line}\n{out}");
    }
    let (code, out, _) = run(&["inspect", text(path), "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["about"]["samples"]), (0, &1600.into()));
    assert_eq!(json["tensors"][1]["shape"], serde_json::json!([4, 2]));
    let (code, _, error) = run(&["inspect", text(&path.join("nowhere"))]);
    assert!(code == 1 && error.contains("nowhere"), "{error}");
}

#[test]
fn diff_counts_what_differs() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    let (a, b) = (path.join("a"), path.join("b"));
    save(&a, 1.0);
    save(&b, 1.5);
    let (code, out, _) = run(&["diff", text(&a), text(&a)]);
    assert!(
        code == 0 && out.contains("the same: 2 tensors, 1 object"),
        "{out}"
    );
    let (code, out, _) = run(&["diff", text(&a), text(&b)]);
    let line = "differs    model/weight: 1 of 8 elements differ, by at most 5.000e-1 absolute, 3.333e-1 relative";
    assert!(
        code == 1 && out.contains(line) && out.contains("the same: 1 tensor"),
        "{out}"
    );
    let (code, _, error) = run(&["diff", text(&a), text(path)]);
    assert!(
        code == 2 && error.contains("no finished checkpoint"),
        "{error}"
    );
}

#[test]
fn reshard_writes_whole_tensors() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    let (from, to) = (path.join("from"), path.join("to"));
    save(&from, 1.0);
    let (code, out, error) = run(&["reshard", text(&from), text(&to)]);
    assert!(
        code == 0 && out.contains("2 tensors in 1 file"),
        "{out}{error}"
    );
    let (code, _, _) = run(&["diff", text(&from), text(&to)]);
    assert_eq!(code, 0);
    let again = run(&["reshard", text(&from), text(&to), "--max-shard-size", "1MB"]);
    assert!(
        again.0 == 1 && again.2.contains("has a checkpoint of step 100"),
        "{}",
        again.2
    );
    let step = from.join("step-00000100");
    for to in [step.clone(), step.join("new"), from.join("new")] {
        let (code, _, error) = run(&["reshard", text(&step), text(&to)]);
        assert!(code == 1 && error.contains("cannot write to"), "{error}");
    }
    assert_eq!(fs::read_dir(&step).unwrap().count(), 3);
    fs::write(path.join("config.toml"), "").unwrap();
    let (code, _, error) = run(&["reshard", text(&from), text(path)]);
    assert!(code == 1 && error.contains("it contains"), "{error}");
    let (code, _, error) = run(&["reshard", text(&from), text(&to), "--files", "0"]);
    assert!(
        code != 0 && error.contains("expected at least 1"),
        "{error}"
    );
}

#[test]
fn verify_says_what_has_changed() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    save(path, 1.0);
    let (code, out, _) = run(&["verify", text(path)]);
    assert!(code == 0 && out.contains("all as written"), "{out}");
    let file = path.join("step-00000100/part-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let (code, _, error) = run(&["verify", text(path)]);
    assert!(
        code == 1
            && error.contains("part-00001.safetensors: chunk 1 of 1 of model/weight [2..4, 0..2]"),
        "{error}"
    );
    assert!(error.contains("1 fault"), "{error}");
}
