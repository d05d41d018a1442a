//! classify MODEL.tcomp INPUT.bin: runs a model on the values in a file, and prints where its first output is largest.

use std::error::Error;
use tcomp::{Kind, Model, Session};

fn classify(model: &str, input: &str) -> Result<usize, Box<dyn Error>> {
    let model = unsafe { Model::load(model, 0) }?;
    let bytes = std::fs::read(input)?;
    let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let shape: Vec<usize> = model.shape(Kind::Input, 0).iter().map(|extent| extent.unwrap_or(1)).collect();
    let mut session = Session::new(&model)?;
    session.set_input(0, &values, &shape)?;
    session.run()?;
    let scores = session.output::<f32>(0).ok_or("the model has no output of float32")?;
    let best = (0..scores.len()).reduce(|best, i| if scores[i] > scores[best] { i } else { best });
    best.ok_or_else(|| "the output is empty".into())
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.len() != 3 {
        eprintln!("usage: classify MODEL.tcomp INPUT.bin");
        std::process::exit(2);
    }
    match classify(&arguments[1], &arguments[2]) {
        Ok(class) => println!("class {class}"),
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(2)
        }
    }
}
