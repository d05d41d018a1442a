// node classify.mjs MODEL.tcomp INPUT.bin: runs a model on the values in a file, and prints where its first output is largest.
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'

const tcomp = createRequire(import.meta.url)(process.env.TCOMP_NODE ?? './tcomp.node')
const [path, input] = process.argv.slice(2)
if (input === undefined) {
  console.error('usage: node classify.mjs MODEL.tcomp INPUT.bin')
  process.exit(2)
}
try {
  const model = tcomp.load(path)
  const shape = tcomp.shape(model, 0).map((extent) => (extent < 0 ? 1 : extent))
  const bytes = readFileSync(input)
  const values = new Float32Array(new Uint8Array(bytes).buffer, 0, bytes.length >> 2)
  const scores = tcomp.run(model, [values], [shape])
  console.log(`class ${scores.indexOf(Math.max(...scores))}`)
} catch (error) {
  console.error(`error: ${error.message}`)
  process.exit(2)
}
