import { renderBridge } from "./bridge.js";

export default { render: renderBridge };
